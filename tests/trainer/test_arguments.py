"""``DPTrainingArguments``: defaults, round trips, and every refusal by argument and next move."""

import copy
import dataclasses
import inspect
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import HfArgumentParser, TrainingArguments

from hf_dp._arguments import own_fields
from hf_dp._dataclasses import default_of
from hf_dp.errors import InvalidArgumentError, UnknownArgumentError, UnsupportedArgumentError
from hf_dp.trainer.arguments import GROUPS, DPTrainingArguments, OtherDefaults
from hf_dp.trainer.inherited import REFUSED
from hf_dp.trainer.seq2seq import DPSeq2SeqTrainingArguments
from hf_dp.trainer.sft import DPSFTConfig

INHERITED = {field.name for field in dataclasses.fields(TrainingArguments)}
OWN = [field for field in dataclasses.fields(DPTrainingArguments) if field.name not in INHERITED]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def output_dir(tmp_path):
    return tmp_path / "run"


def make(output_dir, **changes):
    """A small valid private configuration with some arguments changed."""
    values = {"noise_multiplier": 1.0, "expected_batch_size": 4, "use_cpu": True} | changes
    return DPTrainingArguments(output_dir=str(output_dir), **values)


USERS = {"privacy_unit": "user", "privacy_unit_column": "who"}
PUBLIC = {"privacy_mode": "non_private", "noise_multiplier": None, "expected_batch_size": None}
EPSILON = {"noise_multiplier": None}
LOSS = {"noised_loss_bound": 2.0, "noised_loss_budget_ratio": 0.1}
FP = {"privacy_mode": "dp_fp", "dp_fp_variant": "frozen"}
PUBLISHED = FP | {"dp_fp_variant": "published"}
ENCODER = FP | {"dp_fp_variant": "private_encoder", "representation_noise_multiplier": 1.0}
AUTO = {"auto_physical_batch_size": True}
SEARCH = {"private_selection_mean_runs": 3}
# argument, its value, what the message says of it, what else is given
REFUSALS: list[tuple[str, Any, str, dict[str, Any]]] = [
    # budget
    ("privacy_mode", "dp_pf", r"\['non_private', 'dp_sgd', 'dp_fp'\].*'dp_pf'", {}),
    ("privacy_mode", "dpsgd", "Did you mean 'dp_sgd'", {}),
    ("privacy_mode", None, "got None", {}),
    ("target_epsilon", 3.0, "to be left at None with noise_multiplier=1.0.*Set one", {}),
    ("target_epsilon", None, r"without `noise_multiplier`, got None\. Set target_epsilon \(1 .*8 weak\) or noise_m", EPSILON),
    ("target_epsilon", 0, "to be > 0, got 0", EPSILON),
    ("target_epsilon", -1.0, "to be > 0, got -1.0", EPSILON),
    ("target_epsilon", float("inf"), "to be finite", EPSILON),
    ("target_epsilon", True, "to be a number, got True", EPSILON),
    ("target_epsilon", "three", "to be a number, got 'three'.*Correct", EPSILON),
    ("target_epsilon", "nan", "to be finite", EPSILON),
    ("target_delta", 0.0, r"to be in \(0, 1\), got 0.0", {}),
    ("target_delta", 1, r"to be in \(0, 1\), got 1", {}),
    ("noise_multiplier", 0.0, "to be > 0, got 0.0", {}),
    ("accountant", "moments", r"to be one of \['pld', 'rdp', 'prv', 'gdp_clt'\]", {}),
    ("accountant", "gdp_clt", "to be a bound.*Use 'pld'", EPSILON | {"target_epsilon": 3.0}),
    ("accountant", "pld", "to be unset for DP-FP as published", PUBLISHED),
    ("neighboring_relation", "add_remove", r"to be one of \['zero_out'\]", {}),
    # users
    ("privacy_unit", "nation", r"to be one of \['example', 'user'\]", {}),
    (
        "privacy_unit", "patient", r"got 'patient'\. 'user' means whole users\. .* with privacy_unit_name='patient'\.$",
        {"privacy_unit_column": "who", "max_rows_per_unit": 4},
    ),
    ("privacy_unit_column", None, "to be given with privacy_unit='user'", {"privacy_unit": "user"}),
    ("privacy_unit_column", "label", "to be a column other than the label", USERS),
    *[
        (name, value, "to be left at None with privacy_unit='example'", {})
        for name, value in {
            "privacy_unit_column": "who", "privacy_unit_name": "patient", "max_rows_per_unit": 3,
            "unit_reduction": "sum", "unit_sampling": "examples",
        }.items()
    ],
    ("privacy_unit_name", "Row", "to say whose the rows are", USERS),
    ("privacy_unit_name", "", "to be a word or a name", USERS),
    ("max_rows_per_unit", 0, "to be a whole number >= 1", USERS),
    ("unit_reduction", "median", r"to be one of \['mean', 'sum'\]", USERS),
    ("unit_sampling", "rows", r"to be one of \['users', 'examples'\]", USERS),
    (
        "unit_reduction", "mean", "to be left at None with unit_sampling='examples'",
        USERS | {"unit_sampling": "examples"},
    ),
    ("auto_physical_batch_size", True, "to be False with privacy_unit='user'", USERS),
    # a step
    ("expected_batch_size", None, "to be given.*set it", {}),
    ("expected_batch_size", 0, "to be a whole number >= 1", {}),
    ("expected_batch_size", "3.5", "to be a whole number, got '3.5'.*Correct it", {}),
    ("per_device_train_batch_size", 0, "to be a whole number >= 1", {}),
    ("per_example_max_grad_norm", 0, "to be > 0", {}),
    ("clipping", "auto", r"to be one of \['flat', 'automatic', 'per_layer'\]", {}),
    ("max_logical_batch_size", 0, "to be a whole number >= 1, got 0", {}),
    ("max_grad_norm", 1.0, "to be unset or 0.*clip_noised_gradient=True", {}),
    ("max_grad_norm", -1.0, "to be >= 0", {}),
    ("clip_noised_gradient", True, "to be False without `max_grad_norm`", {}),
    ("clip_noised_gradient", "no", "to be True or False.*quotes", {}),
    ("adam_bc_floor", 0, "to be > 0, got 0", {}),
    ("adam_bc_floor", 0.1, "to be left at None with optim='sgd'", {"optim": "sgd"}),
    (
        "adam_bc_floor", 0.1, "to be left at None with clip_noised_gradient=True",
        {"max_grad_norm": 1.0, "clip_noised_gradient": True},
    ),
    ("private_selection_mean_runs", 0, "to be", {}),
    ("private_selection_mean_runs", 1.0, "to be", {"accountant": "rdp"}),
    ("earlier_runs", ["a"], "left at .* with private_selection_mean_runs=3", SEARCH),
    ("evaluate_on_training_rows", True, "left at .* with private_selection_mean_runs=3", SEARCH),
    ("release", ["clipped_gradient_norm"], "left at .* private_selection_mean_runs=3", SEARCH),
    # memory
    ("clipping_strategy", "ghost", r"\['book_keeping', 'two_pass', 'per_example'\]", {}),
    ("clipping_memory_ratio", 0.9, "to be at least 1.*got 0.9", {}),
    ("chunked_loss", "yes", "to be True or False.*quotes", {}),
    ("max_tokens_per_physical_batch", 0, "to be a whole number >= 1, got 0", {}),
    ("auto_physical_batch_length", 128, "left at None with auto_physical_batch_size=False", {}),
    ("auto_physical_batch_length", 0, "to be a whole number >= 1, got 0", AUTO),
    ("auto_physical_batch_size", True, "left at False with dp_fp_variant='frozen'", FP),
    # rows, and what leaves
    ("earlier_runs", "outputs/first", "to be a list of folders, got 'outputs/first'", {}),
    ("other_training", "mine", "to be one of .*public_rows.*, got 'mine'", {}),
    ("padding_values", {"a": "0"}, "to be a number, got '0'", {}),
    ("padding_values", [1], r"to be a mapping from columns to numbers, got \[1\]", {}),
    ("rows_are_chunks", "yes", "to be True or False, got 'yes'", {}),
    ("noised_loss_bound", 2.0, "left at None with noised_loss_budget_ratio=None.*both", {}),
    ("noised_loss_budget_ratio", 0.1, "left at None with noised_loss_bound=None.*both", {}),
    ("noised_loss_bound", 0, "to be > 0, got 0.*public", LOSS),
    ("noised_loss_bound", float("nan"), "to be finite, got nan", LOSS),
    ("noised_loss_bound", "much", "to be a number, got 'much'", LOSS),
    ("noised_loss_budget_ratio", 1.0, r"to be in \(0, 1\), got 1.0.*A hundredth", LOSS),
    ("noised_loss_budget_ratio", True, "to be a number, got True", LOSS),
    ("noised_loss_bound", 2.0, "left at None with privacy_mode='dp_fp'.*Remove it", FP),
    ("release", ["grad_norm"], r"\['training_loss', 'clipped_gradient_norm'\].*empty", {}),
    ("release", "training_loss", "to be a list of names.*Leave it empty", {}),
    ("release", ["clipped_gradient_norm"], "without 'clipped_gradient_norm'.*'dp_fp'", FP),
    ("insecure_seed", -1, "to be a whole number >= 0", {}),
    ("insecure_seed", True, "got True", {}),
    # DP-FP
    (
        "dp_fp_variant", None,
        "to be one of 'frozen', 'private_encoder', 'published' with privacy_mode='dp_fp', got None. 'frozen' .* is proven for .*. "
        "'private_encoder' .* is proven, too. 'published' .* nothing is proven, and no epsilon is printed.$", FP,
    ),
    ("dp_fp_variant", "best", "to be one of", FP),
    ("dp_fp_variant", "frozen", "Only DP-FP reads it. Remove it, or set privacy", {}),
    ("num_micro_batches", 0, "to be a whole number >= 1", PUBLISHED),
    ("num_micro_batches", 3, "to be 1 with a private", ENCODER),
    ("representation_clipping_norm", 0, "to be", PUBLISHED),
    ("labels_in_vector", True, "to be left at False with", PUBLISHED),
    ("labels_in_vector", True, "to be left", {}),
    ("clipping", "automatic", "to be left at 'flat'", PUBLISHED),
    ("max_logical_batch_size", 20, "to be left at None", FP),
    ("representation_noise_multiplier", 1.0, "There `noise_multiplier` is the noise", FP),
    # audit
    ("audit_scores", "losses", "left at None with audit_canaries=None.*audit_canaries=1000", {}),
    ("audit_canaries", 9, "left at None with privacy_mode='dp_fp'", FP),
    ("audit_canaries", 9, "left at None with privacy_unit='user'", USERS),
    ("audit_canaries", 9, "left at None with release=", {"release": ["training_loss"]}),
    # arguments of transformers
    ("learning_rate", "fast", "to be a number, got 'fast'.*Correct it", {}),
    ("fp16", True, "to be False.*bf16=True", {}),
    ("gradient_accumulation_steps", 2, "to be 1.*Set `expected_batch_size`", {}),
    ("label_smoothing_factor", 0.1, "to be 0.*Remove it", {}),
    ("neftune_noise_alpha", 5.0, "to be None.*Remove it", {}),
    ("neftune_noise_alpha", 0.0, "to be None.*Remove it", {}),
    ("auto_find_batch_size", True, "Set `auto_physical_batch_size=True`", {}),
    ("use_liger_kernel", True, "to be False.*Remove it", {}),
    ("deepspeed", "ds_config.json", "to be None.*Remove it", {}),
    ("deepspeed", {"zero_optimization": {"stage": 2}}, "to be None.*Remove it", {}),
    ("fsdp_config", {"version": 1}, "version=2.*Use version 2", {}),
    ("fsdp_config", {"fsdp_version": "1"}, "FSDP1", {"fsdp": True}),
    ("fsdp_config", {"xla": True}, "XLA", {}),
    ("parallelism_config", object(), "to be None.*FSDP2", {}),
    ("optim", "lomo", 'to be an optimizer that steps after the backward.*Use "adamw_torch"', {}),
    ("optim", "apollo_adamw_layerwise", 'Use "adamw_torch"', {}),
    ("include_num_input_tokens_seen", True, "to be 'no'.*Remove it", {}),
    ("include_num_input_tokens_seen", "non_padding", "to be 'no'.*Remove it", {}),
    ("dataloader_drop_last", True, "to be False.*Remove it", {}),
    ("dataloader_in_order", False, "to be True.*Remove it", {}),
    ("train_sampling_strategy", "group_by_length", "to be 'random'.*Remove it", {}),
    ("data_seed", 0, "to be None.*`insecure_seed`", {}),
    ("skip_memory_metrics", False, "to be True.*hf-dp bench memory", {}),
    ("debug", "underflow_overflow", "Remove it", {}),
    ("torch_empty_cache_steps", 10, "to be None", {}),
    ("save_on_each_node", True, "to be False.*rank 0 saved", {}),
    ("enable_jit_checkpoint", True, "to be False.*already saves on SIGTERM", {}),
    ("report_to", "codecarbon", "to be among .*got 'codecarbon'", {}),
    ("hub_strategy", "checkpoint", "to be 'end' or 'every_save'", {}),
    ("hub_strategy", "all_checkpoints", "hub_strategy='end'", {}),
    ("hub_strategy", "every_save", "to be left at 'end' with audit_canaries=9", {"audit_canaries": 9}),
    *[
        ("accelerator_config", {name: value}, "to keep split_batches=False.*Remove them", {})
        for name, value in {
            "split_batches": True, "dispatch_batches": True, "even_batches": False,
            "use_configured_state": True, "gradient_accumulation_kwargs": {"num_steps": 2},
        }.items()
    ],
    ("activation_checkpointing_kwargs", {"use_reentrant": True}, "Remove these options", {}),
    ("gradient_checkpointing_kwargs", '{"use_reentrant": true}', "Remove these options", {}),
    ("gradient_checkpointing_kwargs", {"selective": True}, "Remove these options", {}),
    # without privacy, arguments about privacy, also where they are 0
    *[
        (name, value, "to be left at .* with privacy_mode='non_private'.*Remove it", PUBLIC)
        for name, value in (
            {field.name: 7 for field in OWN if field.name != "privacy_mode"}
            | {"insecure_seed": 0, "noise_multiplier": 0.0}
        ).items()
    ],
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "message", "beside"), REFUSALS)
def test_refused(name, value, message, beside, output_dir, monkeypatch):
    before = dict(os.environ)
    if name not in {field.name for field in dataclasses.fields(DPTrainingArguments)}:
        pytest.skip("this transformers does not have the argument")

    def reached(self):
        raise AssertionError("devices and processes must not be touched")

    monkeypatch.setattr(TrainingArguments, "__post_init__", reached)
    with pytest.raises(InvalidArgumentError, match=f"`{name}`.*{message}") as error:
        make(output_dir, **{**beside, name: value})
    assert "\n" not in str(error.value), "one problem: just its message"
    assert name not in REFUSED or type(error.value) is UnsupportedArgumentError
    assert not output_dir.exists()
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("name", "move"),
    [
        ("target_epsilom", "Did you mean 'target_epsilon'?"), ("epsilon", "Did you mean 'target_epsilon'?"),
        ("expected_batchsize", "Did you mean 'expected_batch_size'?"), ("delta", "Did you mean 'target_delta'?"),
        ("group_by_length", "Remove it."), ("zzz", "Remove it."), ("sel", "Remove it."),
        ("sigma", "Did you mean 'noise_multiplier'?"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [DPTrainingArguments, DPSeq2SeqTrainingArguments, DPSFTConfig])
def test_an_argument_that_there_is_not(kind, name, move, output_dir):
    said = re.escape(f"Expected an argument of {kind.__name__}, got `{name}`. {move}") + "$"
    for error in (UnknownArgumentError, InvalidArgumentError, TypeError):
        with pytest.raises(error, match=said):
            kind(str(output_dir), use_cpu=True, **{name: 3})
    assert list(inspect.signature(kind).parameters) == [
        each.name for each in dataclasses.fields(kind) if each.init
    ]


def test_a_class_of_ones_own_takes_what_its_init_takes(output_dir):
    class Own(DPTrainingArguments):
        def __init__(self, *args, extra, **others):
            super().__init__(*args, **others)
            self.extra = extra

    given = {"use_cpu": True, "noise_multiplier": 1.0, "expected_batch_size": 4}
    copied = copy.deepcopy(Own(str(output_dir), extra=1, **given))
    assert (copied.extra, copied.expected_batch_size) == (1, 4)


def test_every_refusing_row_is_tested_above():
    assert REFUSED.keys() <= {name for name, *_ in REFUSALS}


@pytest.mark.parametrize(
    "changes",
    [
        {"target_epsilon": 3.0, "noise_multiplier": None},
        {"accountant": "gdp_clt"},
        {"max_grad_norm": 1.0, "clip_noised_gradient": True},
        {"max_grad_norm": 0.0},
        {"release": ["training_loss"]},
        {"insecure_seed": 0},
        {"noised_loss_bound": "2", "noised_loss_budget_ratio": "1e-2"},  # (as YAML leaves them)
        {"bf16": True, "fp16_full_eval": True},
        {"hub_strategy": "every_save", "push_to_hub": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
        {"optim": "sgd"},
        {"eval_strategy": "steps", "load_best_model_at_end": True},
        {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 2},
        {"full_determinism": True, "seed": 1, "restore_callback_states_from_checkpoint": True},
        {"accelerator_config": {"non_blocking": True}},
    ],
)
def test_accepted(changes, output_dir):
    args = make(output_dir, **changes)
    args.check()
    assert args.is_private


@pytest.mark.parametrize("given", [{"early_stop": False}, '{"early_stop": "false"}', {}, None])
def test_checkpointing_is_not_reentrant_unless_that_is_asked_for_and_refused(given, output_dir):
    expected = {"use_reentrant": False, "early_stop": False} if given else given
    args = make(output_dir, gradient_checkpointing_kwargs=given)
    assert args.gradient_checkpointing_kwargs == expected
    args.gradient_checkpointing_kwargs = {"early_stop": False}  # as in a script, later on
    own = DPTrainingArguments.own_copy(args)
    assert own.gradient_checkpointing_kwargs == {"use_reentrant": False, "early_stop": False}


def test_defaults(output_dir):
    args = make(output_dir)
    given = {"noise_multiplier": 1.0, "expected_batch_size": 4, "accountant": "pld"}
    expected = {field.name: default_of(field) for field in OWN} | given
    assert {field.name: getattr(args, field.name) for field in OWN} == expected
    assert (args.max_grad_norm, args.hub_strategy) == (0.0, "end")
    assert args.average_tokens_across_devices is False
    assert not output_dir.exists()


def test_only_the_defaults_in_the_note_differ_from_training_arguments(output_dir):
    public = DPTrainingArguments(str(output_dir), use_cpu=True, privacy_mode="non_private")
    theirs = TrainingArguments(str(output_dir), use_cpu=True).to_dict()

    def differing(ours):
        return {name for name in theirs if ours.to_dict()[name] != theirs[name]}

    of_both = {"hub_strategy", "save_steps", "logging_steps", "save_total_limit"}
    assert differing(public) == of_both and public.max_grad_norm == 1.0
    of_private = {"max_grad_norm", "average_tokens_across_devices"}
    assert differing(make(output_dir)) == of_both | of_private
    others = {field.name for field in own_fields(OtherDefaults)}
    assert of_both == others - {"learning_rate"}  # that is for DP-FP alone


def test_settings_that_follow_from_others(output_dir):
    best = {"load_best_model_at_end": True, "eval_strategy": "steps"}
    assert make(output_dir, **best, eval_steps=50).save_steps == 50
    assert make(output_dir, **best).save_steps == make(output_dir, **best).eval_steps == 0.1
    assert make(output_dir, **best, eval_steps=0.2).save_steps == 0.2
    assert make(output_dir, **best, logging_steps=10).save_steps == 10
    assert make(output_dir, **best, eval_steps=50, save_steps=100).save_steps == 100
    args = make(output_dir, dataloader_pin_memory=True, use_cpu=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(DataLoader([1], pin_memory=args.dataloader_pin_memory))
    if not torch.accelerator.is_available():
        with pytest.warns(UserWarning, match="pin_memory"):
            list(DataLoader([1], pin_memory=True))


def test_numbers_given_as_text_are_converted(output_dir):
    numbers = {
        "noise_multiplier": ("1e0", 1.0), "expected_batch_size": ("1e3", 1000), "target_delta": ("1e-5", 1e-5),
        "per_example_max_grad_norm": ("0.5", 0.5), "learning_rate": ("5e-4", 5e-4), "max_steps": ("10", 10),
        "seed": ("9007199254740993", 9007199254740993),  # 2**53 + 1: not through a float
    }  # fmt: skip
    args = make(output_dir, **{name: text for name, (text, _) in numbers.items()})
    for name, (_, number) in numbers.items():
        assert (getattr(args, name), type(getattr(args, name))) == (number, type(number)), name


def test_all_problems_at_once(output_dir):
    with pytest.raises(InvalidArgumentError) as error:
        make(output_dir, expected_batch_size=None, target_delta=2, fp16=True, data_seed=1)
    lines = str(error.value).splitlines()
    assert lines[0] == "4 arguments must change before this run can start:"
    assert len(lines) == 5
    for name in ("expected_batch_size", "target_delta", "fp16", "data_seed"):
        assert f"- Expected `{name}`" in str(error.value)
    assert type(error.value) is InvalidArgumentError
    with pytest.raises(UnsupportedArgumentError, match="2 arguments"):
        make(output_dir, fp16=True, data_seed=1)
    assert not output_dir.exists()
    with pytest.raises(InvalidArgumentError, match="3 arguments") as error:
        make(output_dir, **USERS, max_rows_per_unit=0, unit_reduction="x", unit_sampling="y")
    assert all(name in str(error.value) for name in ("max_rows_per_unit", "unit_reduction"))
    with pytest.raises(InvalidArgumentError, match="2 arguments.*\n.*canaries.*\n.*scores"):
        make(output_dir, audit_canaries=0, audit_scores="x")


def test_without_privacy_transformers_rules(output_dir):
    stock = {"gradient_accumulation_steps": 2, "data_seed": 3, "label_smoothing_factor": 0.1}
    args = make(output_dir, **PUBLIC, **stock)
    args.check()
    assert not args.is_private
    assert args.average_tokens_across_devices is True


def test_accelerate_launch_that_starts_one_process_instead_of_two_is_refused(
    output_dir, monkeypatch
):
    message = (
        r"^`accelerate launch --cpu --num_processes N` started one process\. .*"
        r"`accelerate launch --config_file (\S+)`, `torchrun"
    )
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "True"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UnsupportedArgumentError, match=message) as refused:
        make(output_dir)
    file = re.match(message, str(refused.value))[1]
    assert "num_processes: 2" in Path(file).read_text()


def test_what_the_process_and_later_changes_make_wrong_is_refused(output_dir, monkeypatch):
    args = make(output_dir)
    args.fp16 = True
    args.gradient_accumulation_steps = 4
    message = r"(?s)`gradient_accumulation_steps`.*`fp16`"
    with pytest.raises(UnsupportedArgumentError, match=message):
        args.check()
    with pytest.raises(UnsupportedArgumentError, match="`fsdp` to be unset on a CPU.*fully_shard"):
        make(output_dir, fsdp=True)
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    message = r"`n_gpu` to be at most 1.*CUDA_VISIBLE_DEVICES"
    with pytest.raises(UnsupportedArgumentError, match=message):
        make(output_dir)
    assert make(output_dir, **PUBLIC).n_gpu == 2


def test_round_trip_through_a_dict_and_from_training_arguments(output_dir):
    args = make(output_dir, release=["training_loss"], target_delta=1e-6, eval_strategy="epoch")
    again = DPTrainingArguments(**args.to_dict())
    assert again.to_dict() == args.to_dict()
    assert dataclasses.replace(args, noise_multiplier=2.0).noise_multiplier == 2.0
    assert '"release": [' in args.to_json_string()
    plain = TrainingArguments(str(output_dir), use_cpu=True, learning_rate=1e-3).to_dict()
    assert DPTrainingArguments(**plain, privacy_mode="non_private").learning_rate == 1e-3
    private = {"target_epsilon": 3.0, "expected_batch_size": 4}
    with pytest.raises(UnsupportedArgumentError, match="`max_grad_norm`.*got 1.0"):
        DPTrainingArguments(**plain, **private)  # not what a private run means
    assert DPTrainingArguments(**plain | {"max_grad_norm": None}, **private).max_grad_norm == 0.0


def test_command_line(output_dir):
    parser = HfArgumentParser(DPTrainingArguments)
    line = "--use_cpu --target_epsilon 8 --expected_batch_size 16 --release training_loss"
    line += " --clip_noised_gradient --max_grad_norm 1"
    words = ["--output_dir", str(output_dir), *line.split()]
    (args,) = parser.parse_args_into_dataclasses(words)
    assert (args.target_epsilon, args.expected_batch_size, args.max_grad_norm) == (8.0, 16, 1.0)
    assert (args.release, args.clip_noised_gradient) == (["training_loss"], True)
    assert args.noise_multiplier is None


def test_every_field_stands_in_the_docstring_once_with_its_help():
    text = DPTrainingArguments.__doc__
    documented = re.findall(r"^    (\w+) \(`.*\):$", text, flags=re.MULTILINE)
    assert len(documented) == len(set(documented))
    declared = {field.name for group in (*GROUPS, OtherDefaults) for field in own_fields(group)}
    assert set(documented) == declared >= {field.name for field in OWN}
    assert "target_epsilon (`float`, *optional*):\n        Epsilon to spend" in text
    for field in dataclasses.fields(DPTrainingArguments):
        if field.name in declared:
            assert field.metadata["help"].endswith("."), field.name
            assert not re.search(r"(?<!%)%(?!%)", field.metadata["help"]), field.name
