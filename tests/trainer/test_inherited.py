"""Every argument of transformers works or is refused, and so is what the environment may set."""

import dataclasses
import functools
import inspect
import re
from pathlib import Path

import pytest
import tiny
from transformers import TrainerCallback, TrainingArguments
from transformers.integrations import integration_utils
from transformers.training_args import OptimizerNames

from hf_dp.errors import UnsupportedArgumentError
from hf_dp.trainer import inherited
from hf_dp.trainer.inherited import REFUSED, TRACKERS, environment_problems, unknown_fields

INSTALLED = {field.name for field in dataclasses.fields(TrainingArguments)}
# Optimizers that step parameter by parameter inside the backward pass, before any noise is added.
STEPPING_IN_BACKWARD = set(
    """lomo adalomo galore_adamw_layerwise galore_adamw_8bit_layerwise galore_adafactor_layerwise
    apollo_adamw_layerwise""".split()
)


@dataclasses.dataclass
class NewerTrainingArguments(TrainingArguments):
    """What a later transformers may look like: one argument more."""

    share_everything: bool = dataclasses.field(default=False, metadata={"help": "New."})


def test_every_field_and_optimizer_works_or_is_refused_and_defaults_work(tmp_path):
    assert unknown_fields() == []
    names = [*inherited.WORKS, *inherited.FREE, *REFUSED]
    assert len(names) == len(set(names))
    assert set(names) - INSTALLED <= inherited.VERSION_DEPENDENT <= set(names)
    assert inherited.inherited_problems(TrainingArguments(str(tmp_path), use_cpu=True)) == {}
    for field in dataclasses.fields(TrainingArguments):
        assert field.name not in REFUSED or REFUSED[field.name].accepts(field.default)
    names = {member.value for member in OptimizerNames}
    assert names == {*inherited.STEPPING_OPTIMIZERS} | STEPPING_IN_BACKWARD
    accepts = REFUSED["optim"].accepts
    assert {each.value for each in OptimizerNames if not accepts(each)} == STEPPING_IN_BACKWARD
    assert not accepts("an_optimizer_of_next_year")


def test_a_planted_new_field_is_refused_unless_it_has_its_default(tmp_path):
    assert [field.name for field in unknown_fields(NewerTrainingArguments)] == ["share_everything"]
    unset = NewerTrainingArguments(str(tmp_path), use_cpu=True)
    assert inherited.inherited_problems(unset, NewerTrainingArguments) == {}
    used = NewerTrainingArguments(str(tmp_path), use_cpu=True, share_everything=True)
    (problem,) = inherited.inherited_problems(used, NewerTrainingArguments).values()
    assert isinstance(problem, UnsupportedArgumentError)
    assert re.search("`share_everything` to be False.*got True.*Remove it", str(problem))


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("accelerator_config", None, True),
        ("accelerator_config", {"non_blocking": True, "use_seedable_sampler": False}, True),
        ("accelerator_config", '{"split_batches": "true"}', False),
        ("accelerator_config", {"dispatch_batches": False, "gradient_accumulation_kwargs": None}, True),
        ("accelerator_config", "/no/such/file.json", True),  # TrainingArguments refuses it itself
        ("accelerator_config", "accelerator.json", False),
        ("report_to", "none", True),
        ("report_to", [], True),
        ("report_to", ["tensorboard", "wandb"], True),
        ("report_to", "swanlab", True),
        ("report_to", "flyte", False),
        ("report_to", ["tensorboard", "codecarbon"], False),
        ("report_to", "a_new_tracker", False),
    ],
)  # fmt: skip
def test_a_value_in_each_of_its_forms_is_accepted_or_not(
    name, value, accepted, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("accelerator.json").write_text('{"even_batches": false}')
    assert REFUSED[name].accepts(value) is accepted


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
        ("CLEARML_LOG_MODEL", None, "FALSE"),  # which uploads unless it is told not to
        ("HF_DVCLIVE_LOG_MODEL", "all", "false"),
        ("SWANLAB_LOG_MODEL", "true", "false"),
    ],
)
def test_environment(variable, bad, good, monkeypatch):
    readers = [name for name, read in TRACKERS.items() if variable in read]
    report_to = ["tensorboard", *readers[:1]] if readers else "none"
    monkeypatch.delenv(variable, raising=False)
    assert bad is None or environment_problems(report_to) == {}
    if bad is not None:
        monkeypatch.setenv(variable, bad)
    problem = environment_problems(report_to)[f"${variable}"]
    assert isinstance(problem, UnsupportedArgumentError)
    assert f"Expected `${variable}`" in str(problem)
    assert repr((bad or "true").lower()) in str(problem)
    if readers:
        known = "get_available_reporting_integrations"
        monkeypatch.setattr(inherited, known, lambda: readers[:1])
        assert environment_problems("all").keys() == {f"${variable}"}
        assert environment_problems(["tensorboard"]) == {}
    monkeypatch.setenv(variable, good)
    assert environment_problems(report_to) == {}


def tracker(name: str) -> TrainerCallback:
    """A user's own kind of a tracker, of a service that is not installed."""
    theirs = integration_utils.INTEGRATION_TO_CALLBACK[name]
    return type("Mine", (theirs,), {"__init__": TrainerCallback.__init__})()


def test_trackers_among_callbacks_are_as_if_report_to_named_them(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_WATCH", "gradients")
    tiny.trainer(tmp_path, given={"callbacks": [tracker("tensorboard")]}, report_to="none")
    for name, said in (("wandb", "WANDB_WATCH.*gradients"), ("flyte", "`callbacks` to be among")):
        with pytest.raises(UnsupportedArgumentError, match=said):
            tiny.trainer(tmp_path, given={"callbacks": [tracker(name)]}, report_to="none")
    late = tiny.trainer(tmp_path, report_to="none")
    late.add_callback(tracker("comet_ml"))
    monkeypatch.setenv("COMET_LOG_ASSETS", "1")
    with pytest.raises(UnsupportedArgumentError, match="COMET_LOG_ASSETS"):
        late.train()
    assert late.ledger.steps() == 0


source_of = functools.cache(inspect.getsource)


def unread_switches() -> set[str]:
    """Switches of uploads that transformers' callbacks of accepted trackers read and we do not."""
    found = set()
    for tracker, switches in TRACKERS.items():
        for kind in integration_utils.INTEGRATION_TO_CALLBACK[tracker].__mro__[:-1]:
            source = source_of(kind)
            read = set(re.findall(r"[A-Z_]+_LOG_(?:MODEL|ARTIFACTS|ASSETS)\b|WANDB_WATCH", source))
            found |= read - set(switches)
    return found


def test_every_switch_of_an_accepted_tracker_is_checked(monkeypatch):
    assert unread_switches() == set()
    assert {
        name for switches in TRACKERS.values() for name in switches
    } <= inherited.ENVIRONMENT.keys()
    monkeypatch.setitem(TRACKERS, "dvclive", ())  # planted
    assert unread_switches() == {"HF_DVCLIVE_LOG_MODEL"}
