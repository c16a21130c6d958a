"""Every argument of the installed ``TrainingArguments`` has a verdict, and the table cannot go
stale unnoticed."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest
from transformers import TrainingArguments
from transformers.integrations import integration_utils
from transformers.training_args import OptimizerNames

from hf_dp.errors import UnsupportedArgumentError
from hf_dp.trainer import inherited
from hf_dp.trainer.inherited import (
    ENVIRONMENT_TABLE,
    FREE,
    REFUSED,
    STEPPING_IN_BACKWARD,
    STEPPING_OPTIMIZERS,
    VERSION_DEPENDENT,
    WORKS,
    environment_problems,
    inherited_problems,
    unknown_fields,
)

INSTALLED = {field.name for field in dataclasses.fields(TrainingArguments)}


@dataclasses.dataclass
class NewerTrainingArguments(TrainingArguments):
    """What a later transformers may look like: one argument more."""

    share_everything: bool = dataclasses.field(default=False, metadata={"help": "New."})


def test_every_installed_field_works_or_is_refused():
    assert unknown_fields() == []


def test_each_name_stands_once_and_is_installed_unless_the_version_lacks_it():
    names = [*WORKS, *FREE, *REFUSED]
    assert len(names) == len(set(names))
    assert set(names) - INSTALLED <= VERSION_DEPENDENT <= set(names)


def test_a_planted_new_field_is_found():
    assert [field.name for field in unknown_fields(NewerTrainingArguments)] == ["share_everything"]


def test_a_planted_new_field_is_refused_unless_it_has_its_default(tmp_path):
    unset = NewerTrainingArguments(str(tmp_path), use_cpu=True)
    used = NewerTrainingArguments(str(tmp_path), use_cpu=True, share_everything=True)
    assert inherited_problems(unset, NewerTrainingArguments) == {}
    problems = inherited_problems(used, NewerTrainingArguments)
    assert list(problems) == ["share_everything"]
    with pytest.raises(
        UnsupportedArgumentError, match="`share_everything` to be False.*got True.*Remove it"
    ):
        raise problems["share_everything"]


def test_defaults_and_parsed_defaults_are_accepted(tmp_path):
    assert inherited_problems(TrainingArguments(str(tmp_path), use_cpu=True)) == {}
    raw = {
        field.name: field.default
        for field in dataclasses.fields(TrainingArguments)
        if field.name in REFUSED
    }
    assert [name for name, value in raw.items() if REFUSED[name].problem(name, value)] == []


def test_every_optimizer_of_transformers_is_sorted():
    names = {member.value for member in OptimizerNames}
    assert names == STEPPING_OPTIMIZERS | STEPPING_IN_BACKWARD
    assert not STEPPING_OPTIMIZERS & STEPPING_IN_BACKWARD
    row = REFUSED["optim"]
    assert {
        member.value for member in OptimizerNames if row.problem("optim", member)
    } == STEPPING_IN_BACKWARD
    assert row.problem("optim", "an_optimizer_of_next_year")


@pytest.mark.parametrize(
    ("value", "refused"),
    [
        (None, False),
        ({"non_blocking": True, "use_seedable_sampler": False}, False),
        ('{"split_batches": "true"}', True),
        ({"dispatch_batches": False, "gradient_accumulation_kwargs": None}, False),
        ("/no/such/file.json", False),  # TrainingArguments refuses it itself
    ],
)
def test_accelerator_config_in_every_form(value, refused):
    assert bool(REFUSED["accelerator_config"].problem("accelerator_config", value)) == refused


def test_accelerator_config_file_is_read(tmp_path):
    path = tmp_path / "accelerator.json"
    path.write_text('{"even_batches": false}')
    assert REFUSED["accelerator_config"].problem("accelerator_config", str(path))


@pytest.mark.parametrize(
    ("variable", "bad", "good"),
    [
        ("ACCELERATE_MIXED_PRECISION", "fp16", "bf16"),
        ("ACCELERATE_MIXED_PRECISION", "fp8", "no"),
        ("ACCELERATE_DYNAMO_BACKEND", "inductor", "NO"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "false"),
        ("ACCELERATE_USE_FSDP", "1", "0"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", "false"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "false"),
        ("WANDB_WATCH", "all", "false"),
        ("WANDB_WATCH", "gradients", "parameters"),
        ("WANDB_LOG_MODEL", "checkpoint", "end"),
        ("HF_MLFLOW_LOG_ARTIFACTS", "TRUE", "0"),
        ("HF_DAGSHUB_LOG_ARTIFACTS", "1", "FALSE"),
        ("COMET_LOG_ASSETS", "TRUE", "FALSE"),
        ("HF_DVCLIVE_LOG_MODEL", "all", "false"),
        ("SWANLAB_LOG_MODEL", "true", "false"),
    ],
)
def test_environment(variable, bad, good, monkeypatch):
    readers = [name for name, read in inherited.TRACKERS.items() if variable in read]
    tracker = readers[0] if readers else None
    report_to = ["tensorboard", tracker] if tracker else "none"
    monkeypatch.setenv(variable, bad)
    problem = environment_problems(report_to)[variable]
    assert isinstance(problem, UnsupportedArgumentError)
    assert f"Expected `${variable}`" in str(problem)
    assert repr(bad) in str(problem)
    if tracker:
        monkeypatch.setattr(inherited, "get_available_reporting_integrations", lambda: [tracker])
        assert environment_problems("all").keys() == {variable}
        assert environment_problems(["tensorboard"]) == {}
    monkeypatch.setenv(variable, good)
    assert environment_problems(report_to) == {}
    monkeypatch.delenv(variable)
    assert environment_problems(report_to) == {}


def test_clearml_uploads_unless_it_is_told_not_to(monkeypatch):
    monkeypatch.delenv("CLEARML_LOG_MODEL", raising=False)
    (problem,) = environment_problems(["clearml"]).values()
    assert "Expected `$CLEARML_LOG_MODEL`" in str(problem) and "output folder" in str(problem)
    assert environment_problems(["tensorboard"]) == {}
    monkeypatch.setenv("CLEARML_LOG_MODEL", "FALSE")
    assert environment_problems(["clearml"]) == {}


@pytest.mark.parametrize(
    ("report_to", "refused"),
    [
        ("none", False), ([], False), (["tensorboard", "wandb"], False), ("swanlab", False),
        ("flyte", True), (["tensorboard", "codecarbon"], True), ("a_new_tracker", True),
    ],
)  # fmt: skip
def test_only_known_trackers_are_accepted(report_to, refused):
    problem = REFUSED["report_to"].problem("report_to", report_to)
    assert (problem is not None) is refused
    assert not refused or "to be among tensorboard" in str(problem)


def unread_switches() -> set[str]:
    """Switches of uploads that transformers' callbacks of accepted trackers read and we do not."""
    found = set()
    for tracker, switches in inherited.TRACKERS.items():
        for kind in integration_utils.INTEGRATION_TO_CALLBACK[tracker].__mro__[:-1]:
            source = inspect.getsource(kind)
            read = set(re.findall(r"[A-Z_]+_LOG_(?:MODEL|ARTIFACTS|ASSETS)\b|WANDB_WATCH", source))
            found |= read - set(switches)
    return found


def test_every_switch_of_an_accepted_tracker_is_checked(monkeypatch):
    assert unread_switches() == set()
    known = {name for switches in inherited.TRACKERS.values() for name in switches}
    assert known <= ENVIRONMENT_TABLE.keys()
    monkeypatch.setitem(inherited.TRACKERS, "dvclive", ())  # planted
    assert unread_switches() == {"HF_DVCLIVE_LOG_MODEL"}
