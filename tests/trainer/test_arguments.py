"""``DPTrainingArguments``: defaults, round trips, and every refusal by argument and next move."""

from __future__ import annotations

import dataclasses
import os
import re
import warnings

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import HfArgumentParser, TrainingArguments

from hf_dp._arguments import own_fields
from hf_dp.errors import InvalidArgumentError, UnsupportedArgumentError
from hf_dp.trainer.arguments import GROUPS, DPTrainingArguments, OtherDefaults
from hf_dp.trainer.inherited import REFUSED

OWN = [
    field
    for field in dataclasses.fields(DPTrainingArguments)
    if field.name not in {inherited.name for inherited in dataclasses.fields(TrainingArguments)}
]


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

# (changed arguments, what the message says: the argument, and after it the next move)
REFUSALS = [
    # noised loss
    (
        {"noised_loss_bound": 2.0},
        r"`noised_loss_budget_ratio` to be given with `noised_loss_bound`, got None.*remove both",
    ),
    (
        {"noised_loss_budget_ratio": 0.1},
        r"`noised_loss_bound` to be given with `noised_loss_budget_ratio`, got None.*remove both",
    ),
    (
        {"noised_loss_bound": 0, "noised_loss_budget_ratio": 0.1},
        r"`noised_loss_bound` to be > 0, got 0.*public",
    ),
    (
        {"noised_loss_bound": float("nan"), "noised_loss_budget_ratio": 0.1},
        r"`noised_loss_bound` to be finite, got nan",
    ),
    (
        {"noised_loss_bound": "much", "noised_loss_budget_ratio": 0.1},
        r"`noised_loss_bound` to be a number, got 'much'",
    ),
    (
        {"noised_loss_bound": 2.0, "noised_loss_budget_ratio": 1.0},
        r"`noised_loss_budget_ratio` to be in \(0, 1\), got 1.0.*A hundredth",
    ),
    (
        {"noised_loss_bound": 2.0, "noised_loss_budget_ratio": True},
        r"`noised_loss_budget_ratio` to be a number, got True",
    ),
    (
        {"privacy_mode": "dp_fp", "dp_fp_variant": "frozen", "noised_loss_bound": 2.0},
        r"`noised_loss_bound` to be unset when privacy_mode='dp_fp'.*Remove it",
    ),
    # budget
    ({"privacy_mode": "dp_pf"}, r"`privacy_mode`.*\['non_private', 'dp_sgd', 'dp_fp'\].*'dp_pf'"),
    ({"privacy_mode": "dpsgd"}, r"`privacy_mode`.*Did you mean 'dp_sgd'"),
    ({"privacy_mode": None}, r"`privacy_mode`.*got None"),
    ({"save_on_each_node": True}, r"`save_on_each_node` to be False.*rank 0 saved"),
    (
        {"target_epsilon": 3.0},
        r"`target_epsilon` to be unset when `noise_multiplier` \(1.0\).*Remove one of the two",
    ),
    (
        {"noise_multiplier": None},
        r"`target_epsilon` to be given when `noise_multiplier` is not.*Set exactly one",
    ),
    (
        {"target_epsilon": 0, "noise_multiplier": None},
        r"`target_epsilon` to be > 0, got 0\. Typical",
    ),
    ({"target_epsilon": -1.0, "noise_multiplier": None}, r"`target_epsilon` to be > 0, got -1.0"),
    ({"target_epsilon": float("inf"), "noise_multiplier": None}, r"`target_epsilon` to be finite"),
    (
        {"target_epsilon": True, "noise_multiplier": None},
        r"`target_epsilon` to be a number, got True",
    ),
    (
        {"target_epsilon": "three", "noise_multiplier": None},
        r"`target_epsilon` to be a number, got 'three'.*Correct",
    ),
    ({"target_epsilon": "nan", "noise_multiplier": None}, r"`target_epsilon` to be finite"),
    ({"target_delta": 0.0}, r"`target_delta` to be in \(0, 1\), got 0.0.*unset"),
    ({"target_delta": 1}, r"`target_delta` to be in \(0, 1\), got 1\. Leave it unset"),
    (
        {"noise_multiplier": 0.0},
        r"`noise_multiplier` to be > 0, got 0.0.*privacy_mode='non_private'",
    ),
    ({"noise_multiplier": -1}, r"`noise_multiplier` to be > 0"),
    ({"accountant": "moments"}, r"`accountant` to be one of \['pld', 'rdp', 'prv', 'gdp_clt'\]"),
    (
        {"accountant": "gdp_clt", "target_epsilon": 3.0, "noise_multiplier": None},
        r"`accountant` to be a bound.*Use 'pld', or give `noise_multiplier`",
    ),
    ({"privacy_unit": "nation"}, r"`privacy_unit` to be one of \['example', 'user'\]"),
    (
        {"privacy_unit": "user"},
        r"`privacy_unit_column` to be given with privacy_unit='user', got None. Name the column",
    ),
    *[
        ({name: value}, rf"`{name}` to be unset with privacy_unit='example'.*privacy_unit='user'")
        for name, value in {
            "privacy_unit_column": "who",
            "privacy_unit_name": "patient",
            "max_rows_per_unit": 3,
            "unit_reduction": "sum",
            "unit_sampling": "examples",
        }.items()
    ],
    (USERS | {"privacy_unit_name": "Row"}, r"`privacy_unit_name` to say whose the rows are"),
    (USERS | {"privacy_unit_name": ""}, r"`privacy_unit_name` to be a word or a name"),
    (USERS | {"max_rows_per_unit": 0}, r"`max_rows_per_unit` to be a whole number >= 1"),
    (USERS | {"unit_reduction": "median"}, r"`unit_reduction` to be one of \['mean', 'sum'\]"),
    (USERS | {"unit_sampling": "rows"}, r"`unit_sampling` to be one of \['users', 'examples'\]"),
    (
        USERS | {"unit_sampling": "examples", "unit_reduction": "mean"},
        r"`unit_reduction` to be unset with unit_sampling='examples'.*Remove it",
    ),
    (
        USERS | {"auto_physical_batch_size": True},
        r"`auto_physical_batch_size` to be False with privacy_unit='user'.*not measured",
    ),
    ({"neighboring_relation": "add_remove"}, r"`neighboring_relation`.*Use 'zero_out'"),
    # mechanism
    ({"expected_batch_size": None}, r"`expected_batch_size`.*got None.*set it"),
    ({"expected_batch_size": 0}, r"`expected_batch_size` to be a whole number >= 1"),
    (
        {"expected_batch_size": "3.5"},
        r"`expected_batch_size` to be a whole number, got '3.5'.*Correct it",
    ),
    (
        {"per_device_train_batch_size": 0},
        r"`per_device_train_batch_size` to be a whole number >= 1",
    ),
    ({"per_example_max_grad_norm": 0}, r"`per_example_max_grad_norm` to be > 0.*default is 0.1"),
    ({"clipping": "auto"}, r"`clipping` to be one of \['flat', 'automatic', 'per_layer'\]"),
    (
        {"clipping_strategy": "ghost"},
        r"`clipping_strategy` to be one of \['book_keeping', 'two_pass', 'per_example'\]",
    ),
    (
        {"clipping_memory_ratio": 0.9},
        r"`clipping_memory_ratio` to be at least 1.*got 0.9",
    ),
    ({"chunked_loss": "yes"}, r"`chunked_loss` to be True or False.*quotes"),
    (
        {"max_tokens_per_physical_batch": 0},
        "`max_tokens_per_physical_batch` to be a whole number >= 1, got 0",
    ),
    (
        {"auto_physical_batch_size": "yes"},
        r"`auto_physical_batch_size` to be True or False.*quotes",
    ),
    (
        {"auto_physical_batch_length": 128},
        r"`auto_physical_batch_length` to be unset without `auto_physical_batch_size`, got 128",
    ),
    (
        {"auto_physical_batch_size": True, "auto_physical_batch_length": 0},
        r"`auto_physical_batch_length` to be a whole number >= 1, got 0",
    ),
    (
        {
            "auto_physical_batch_size": True,
            "privacy_mode": "dp_fp",
            "dp_fp_variant": "published",
        },
        r"`auto_physical_batch_size` to be False with dp_fp_variant='published'",
    ),
    ({"max_logical_batch_size": 0}, "`max_logical_batch_size` to be a whole number >= 1, got 0"),
    (
        {"max_grad_norm": 1.0},
        r"`max_grad_norm` to be unset or 0.*`per_example_max_grad_norm`.*clip_noised_gradient=True",
    ),
    ({"max_grad_norm": -1.0}, r"`max_grad_norm` to be >= 0"),
    (
        {"clip_noised_gradient": True},
        r"`clip_noised_gradient` to be False when.*Set `max_grad_norm` above 0",
    ),
    ({"clip_noised_gradient": "no"}, r"`clip_noised_gradient` to be True or False.*quotes"),
    # what leaves, tests
    (
        {"release": ["grad_norm"]},
        r"`release` to be one of \['training_loss', 'clipped_gradient_norm'\].*Leave it empty",
    ),
    ({"release": "training_loss"}, r"`release` to be a list of names.*Leave it empty"),
    ({"insecure_seed": -1}, r"`insecure_seed` to be a whole number >= 0.*outside tests"),
    ({"insecure_seed": True}, r"`insecure_seed`.*got True"),
    # arguments of transformers
    ({"fp16": True}, r"`fp16` to be False.*bf16=True"),
    (
        {"gradient_accumulation_steps": 2},
        r"`gradient_accumulation_steps` to be 1.*Set `expected_batch_size`",
    ),
    ({"label_smoothing_factor": 0.1}, r"`label_smoothing_factor` to be 0.*Remove it"),
    ({"neftune_noise_alpha": 5.0}, r"`neftune_noise_alpha` to be None.*Remove it"),
    ({"neftune_noise_alpha": 0.0}, r"`neftune_noise_alpha` to be None.*Remove it"),
    (
        {"auto_find_batch_size": True},
        r"`auto_find_batch_size`.*Set `auto_physical_batch_size=True`",
    ),
    ({"use_liger_kernel": True}, r"`use_liger_kernel` to be False.*Remove it"),
    ({"deepspeed": "ds_config.json"}, r"`deepspeed` to be None.*Remove it"),
    ({"deepspeed": {"zero_optimization": {"stage": 2}}}, r"`deepspeed` to be None.*Remove it"),
    ({"fsdp_config": {"version": 1}}, r"`fsdp_config`.*Set \"version\": 2"),
    ({"fsdp": True, "fsdp_config": {"fsdp_version": "1"}}, r"`fsdp_config`.*FSDP1"),
    ({"fsdp_config": {"xla": True}}, r"`fsdp_config`.*XLA"),
    ({"parallelism_config": object()}, r"`parallelism_config` to be None.*Remove it"),
    ({"torch_compile": True}, r"`torch_compile` to be False.*Remove it"),
    ({"torch_compile_backend": "inductor"}, r"`torch_compile_backend` to be None.*Remove it"),
    ({"torch_compile_mode": "default"}, r"`torch_compile_mode` to be None.*Remove it"),
    (
        {"optim": "lomo"},
        r"`optim` to be an optimizer that steps after the backward pass in.*Use \"adamw_torch\"",
    ),
    ({"optim": "adalomo"}, r"`optim`.*Use \"adamw_torch\""),
    ({"optim": "galore_adamw_layerwise"}, r"`optim`.*Use \"adamw_torch\""),
    ({"optim": "apollo_adamw_layerwise"}, r"`optim`.*Use \"adamw_torch\""),
    ({"include_num_input_tokens_seen": True}, r"`include_num_input_tokens_seen`.*Remove it"),
    (
        {"include_num_input_tokens_seen": "non_padding"},
        r"`include_num_input_tokens_seen` to be \"no\".*Remove it",
    ),
    ({"dataloader_drop_last": True}, r"`dataloader_drop_last` to be False.*Remove it"),
    ({"dataloader_in_order": False}, r"`dataloader_in_order` to be True.*Remove it"),
    (
        {"train_sampling_strategy": "group_by_length"},
        r"`train_sampling_strategy` to be \"random\".*Remove it",
    ),
    ({"data_seed": 0}, r"`data_seed` to be None.*`insecure_seed`"),
    ({"skip_memory_metrics": False}, r"`skip_memory_metrics` to be True.*Remove it"),
    ({"debug": "underflow_overflow"}, r"`debug` to be empty.*Remove it"),
    ({"torch_empty_cache_steps": 10}, r"`torch_empty_cache_steps` to be None.*Remove it"),
    (
        {"hub_strategy": "checkpoint"},
        r"`hub_strategy` to be \"end\" or \"every_save\".*hub_strategy=\"end\"",
    ),
    ({"report_to": "codecarbon"}, "`report_to` to be among .*got 'codecarbon'"),
    ({"hub_strategy": "all_checkpoints"}, r"`hub_strategy`.*hub_strategy=\"end\""),
    (
        {"accelerator_config": {"split_batches": True}},
        r"`accelerator_config` to leave split_batches.*Remove them",
    ),
    ({"accelerator_config": {"dispatch_batches": True}}, r"`accelerator_config`.*Remove them"),
    ({"accelerator_config": {"even_batches": False}}, r"`accelerator_config`.*Remove them"),
    ({"accelerator_config": {"use_configured_state": True}}, r"`accelerator_config`.*Remove them"),
    (
        {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
        r"`accelerator_config`.*Remove them",
    ),
    (
        {"activation_checkpointing_kwargs": {"use_reentrant": True}},
        r"`activation_checkpointing_kwargs`.*Remove both options",
    ),
    (
        {"gradient_checkpointing_kwargs": '{"use_reentrant": true}'},
        r"`gradient_checkpointing_kwargs`.*Remove both options",
    ),
    ({"learning_rate": "fast"}, r"`learning_rate` to be a number, got 'fast'.*Correct it"),
    # without privacy, arguments about privacy
    (
        PUBLIC | {"target_epsilon": 3.0},
        r"`target_epsilon` to be left at None when privacy_mode='non_private'.*Remove",
    ),
    (
        PUBLIC | {"target_delta": 1e-5},
        r"`target_delta` to be left at None.*Remove it, or set privacy_mode",
    ),
    (
        PUBLIC | {"noise_multiplier": 0.0},
        r"`noise_multiplier` to be left at None.*got 0.0.*Remove it",
    ),
    (
        PUBLIC | {"expected_batch_size": 4},
        r"`expected_batch_size`.*Use `per_device_train_batch_size`",
    ),
    (
        PUBLIC | {"per_example_max_grad_norm": 1.0},
        r"`per_example_max_grad_norm` to be left at 0.1.*Remove it",
    ),
    (PUBLIC | {"clipping": "automatic"}, r"`clipping` to be left at 'flat'.*Remove it"),
    (PUBLIC | {"clipping_strategy": "per_example"}, r"`clipping_strategy` to be left.*Remove it"),
    (PUBLIC | {"chunked_loss": True}, r"`chunked_loss` to be left.*Remove it"),
    (PUBLIC | {"clipping_memory_ratio": 2}, r"`clipping_memory_ratio` to be left.*Remove it"),
    (
        PUBLIC | {"max_tokens_per_physical_batch": 64},
        r"`max_tokens_per_physical_batch` to be left.*Remove it",
    ),
    (
        PUBLIC | {"auto_physical_batch_size": True},
        r"`auto_physical_batch_size` to be left at False.*Remove it",
    ),
    (
        PUBLIC | {"auto_physical_batch_length": 9},
        r"`auto_physical_batch_length` to be left at None.*Remove it",
    ),
    (PUBLIC | {"adam_bc_floor": 0.1}, r"`adam_bc_floor` to be left.*Remove it"),
    ({"adam_bc_floor": 0}, r"`adam_bc_floor` to be > 0, got 0"),
    ({"adam_bc_floor": 0.1, "optim": "sgd"}, r"`adam_bc_floor` to be unset with optim='sgd'"),
    (
        {"adam_bc_floor": 0.1, "max_grad_norm": 1.0, "clip_noised_gradient": True},
        r"`adam_bc_floor` to be unset with clip_noised_gradient",
    ),
    (PUBLIC | {"sampling": "random_allocation"}, r"`sampling` to be left.*Remove it"),
    (PUBLIC | {"private_selection_mean_runs": 3}, r"`private_selection_mean_runs` to be left"),
    ({"private_selection_mean_runs": 0}, r"`private_selection_mean_runs` to be"),
    ({"private_selection_mean_runs": 1.0, "accountant": "rdp"}, r"`private_selection_mean_runs`"),
    (
        {"private_selection_mean_runs": 3, "earlier_runs": ["a"]},
        r"`earlier_runs` to be empty with private_selection_mean_runs",
    ),
    (
        {"private_selection_mean_runs": 3, "evaluate_on_training_rows": True},
        r"`evaluate_on_training_rows` to be False with private_selection_mean_runs",
    ),
    (
        {"private_selection_mean_runs": 3, "release": ["clipped_gradient_norm"]},
        r"`release` to be empty with private_selection_mean_runs",
    ),
    (PUBLIC | {"max_logical_batch_size": 64}, r"`max_logical_batch_size` to be left.*Remove it"),
    (PUBLIC | {"accountant": "rdp"}, r"`accountant` to be left at None.*Remove it"),
    (PUBLIC | {"privacy_unit": "user"}, r"`privacy_unit` to be left.*Remove it"),
    (
        PUBLIC | {"neighboring_relation": "add_remove"},
        r"`neighboring_relation` to be left.*Remove it",
    ),
    (
        PUBLIC | {"clip_noised_gradient": True},
        r"`clip_noised_gradient` to be left at False.*Remove it",
    ),
    (
        {"earlier_runs": "outputs/first"},
        r"`earlier_runs` to be a list of folders, got 'outputs/first'",
    ),
    (PUBLIC | {"earlier_runs": ["a"]}, r"`earlier_runs` to be left at \[\].*Remove it"),
    ({"other_training": "mine"}, r"`other_training` to be one of .*public_rows.*, got 'mine'"),
    (PUBLIC | {"other_training": "public_rows"}, r"`other_training` to be left at None"),
    ({"enable_jit_checkpoint": True}, r"`enable_jit_checkpoint` to be False.*SIGTERM by itself"),
    (PUBLIC | {"padding_values": {"a": 0}}, r"`padding_values` to be left at {}.*Remove it"),
    (PUBLIC | {"rows_are_chunks": True}, r"`rows_are_chunks` to be left at False.*Remove it"),
    (
        PUBLIC | {"adapter_init_data_is_public": True},
        r"`adapter_init_data_is_public` to be left at False",
    ),
    (
        PUBLIC | {"evaluate_on_training_rows": True},
        r"`evaluate_on_training_rows` to be left at False",
    ),
    ({"padding_values": {"a": "0"}}, r"`padding_values` to be a mapping from columns to numbers"),
    (
        {"padding_values": [1]},
        r"`padding_values` to be a mapping from columns to numbers, got \[1\]",
    ),
    ({"rows_are_chunks": "yes"}, r"`rows_are_chunks` to be True or False, got 'yes'"),
    (PUBLIC | {"release": ["training_loss"]}, r"`release` to be left at \[\].*Remove it"),
    (
        PUBLIC | {"noised_loss_bound": 2.0},
        r"`noised_loss_bound` to be left at None.*Its logs hold the loss as it is: remove it",
    ),
    (
        PUBLIC | {"noised_loss_budget_ratio": 0.1},
        r"`noised_loss_budget_ratio` to be left at None.*Its logs hold the loss as it is",
    ),
    (PUBLIC | {"insecure_seed": 0}, r"`insecure_seed` to be left at None.*Remove it"),
    *[
        (
            PUBLIC | {name: value},
            rf"`{name}` to be left at .*Remove it, or set privacy_mode='dp_fp'",
        )
        for name, value in {
            "dp_fp_variant": "frozen",
            "representation_clipping_norm": 2.0,
            "num_micro_batches": 8,
            "representation_module": "classifier",
            "representation_release": "fresh",
            "representation_draws": "shared",
            "representation_noise_multiplier": 1.0,
            "representation_budget_ratio": 0.1,
            "label_epsilon": 1.0,
            "labels_in_vector": True,
        }.items()  # fmt: skip
    ],
    *[
        (PUBLIC | {name: value}, rf"`{name}` to be left at None.*Remove it")
        for name, value in {
            "audit_canaries": 100,
            "audit_scores": "losses",
            "privacy_unit_column": "who",
            "privacy_unit_name": "patient",
            "max_rows_per_unit": 3,
            "unit_reduction": "sum",
            "unit_sampling": "examples",
        }.items()
    ],
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS)
def test_refused(changes, message, output_dir, monkeypatch):
    before = dict(os.environ)
    supported = {field.name for field in dataclasses.fields(DPTrainingArguments)}
    if not changes.keys() <= supported:
        pytest.skip("this transformers does not have the argument")

    def reached(self):
        raise AssertionError("devices and processes must not be touched")

    monkeypatch.setattr(TrainingArguments, "__post_init__", reached)
    with pytest.raises(InvalidArgumentError, match=re.compile(message)) as error:
        make(output_dir, **changes)
    assert "\n" not in str(error.value), "one problem: just its message"
    in_table = set(changes) & REFUSED.keys()
    if in_table:
        assert type(error.value) is UnsupportedArgumentError
    assert not output_dir.exists()
    assert dict(os.environ) == before


def test_every_refusing_row_of_the_table_is_tested_above():
    tested = {name for changes, _ in REFUSALS for name in changes}
    assert REFUSED.keys() <= tested


def test_every_own_argument_is_refused_without_privacy():
    tested = {
        name
        for changes, _ in REFUSALS
        if changes.get("privacy_mode") == "non_private"
        for name in changes
    }
    assert {field.name for field in OWN} - {"privacy_mode"} <= tested


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


def test_defaults(output_dir):
    args = make(output_dir)
    assert (args.privacy_mode, args.is_private) == ("dp_sgd", True)
    assert (args.target_epsilon, args.target_delta, args.insecure_seed) == (None, None, None)
    assert (args.per_example_max_grad_norm, args.clipping, args.clipping_strategy) == (
        0.1,
        "flat",
        None,
    )
    assert (args.accountant, args.privacy_unit, args.neighboring_relation) == (
        "pld",
        "example",
        "zero_out",
    )
    assert (args.max_grad_norm, args.clip_noised_gradient, args.release) == (0.0, False, [])
    assert args.hub_strategy == "end"
    assert args.average_tokens_across_devices is False
    assert not output_dir.exists()


def test_only_the_defaults_in_the_note_differ_from_training_arguments(output_dir):
    ours = DPTrainingArguments(
        output_dir=str(output_dir), use_cpu=True, privacy_mode="non_private"
    ).to_dict()
    theirs = TrainingArguments(output_dir=str(output_dir), use_cpu=True).to_dict()
    fewer_steps = {"save_steps", "logging_steps", "save_total_limit"}
    of_both = {"hub_strategy"} | fewer_steps
    assert {name for name in theirs if ours[name] != theirs[name]} == of_both
    assert ours["max_grad_norm"] == 1.0
    ours = make(output_dir).to_dict()
    differing = {name for name in theirs if ours[name] != theirs[name]}
    assert differing == of_both | {"max_grad_norm", "average_tokens_across_devices"}
    others = {field.name for field in own_fields(OtherDefaults)}  # learning_rate for DP-FP alone
    assert differing - {"max_grad_norm", "average_tokens_across_devices"} == others - {
        "learning_rate"
    }


def test_the_best_model_is_saved_as_often_as_it_is_looked_for(output_dir):
    best = {"load_best_model_at_end": True, "eval_strategy": "steps"}
    assert make(output_dir, **best, eval_steps=50).save_steps == 50
    assert make(output_dir, **best).save_steps == make(output_dir, **best).eval_steps == 0.1
    assert make(output_dir, **best, eval_steps=50, save_steps=100).save_steps == 100


def test_memory_is_not_pinned_on_a_cpu_where_torch_warns(output_dir):
    args = make(output_dir, dataloader_pin_memory=True, use_cpu=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(DataLoader([1], pin_memory=args.dataloader_pin_memory))
    if not torch.accelerator.is_available():
        with pytest.warns(UserWarning, match="pin_memory"):
            list(DataLoader([1], pin_memory=True))


def test_numbers_given_as_text_are_converted(output_dir):
    args = make(
        output_dir,
        noise_multiplier="1e0",
        expected_batch_size="1e3",
        target_delta="1e-5",
        per_example_max_grad_norm="0.5",
        learning_rate="5e-4",
        max_steps="10",
        seed="9007199254740993",  # 2**53 + 1: not through a float
    )
    assert (args.noise_multiplier, args.target_delta, args.per_example_max_grad_norm) == (
        1.0,
        1e-5,
        0.5,
    )
    assert (args.expected_batch_size, type(args.expected_batch_size)) == (1000, int)
    assert (args.learning_rate, args.max_steps, args.seed) == (5e-4, 10, 9007199254740993)


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


def test_without_privacy_transformers_rules(output_dir):
    args = make(
        output_dir, **PUBLIC, gradient_accumulation_steps=2, data_seed=3, label_smoothing_factor=0.1
    )
    args.check()
    assert not args.is_private
    assert args.average_tokens_across_devices is True


def test_processes_that_do_not_know_of_each_other_are_refused(output_dir, monkeypatch):
    # Without accelerators use_cpu is set; what is left are launchers that accelerate does not know.
    monkeypatch.setattr("hf_dp.trainer.launch.has_accelerator", lambda: True)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(TrainingArguments, "world_size", 1)
    with pytest.raises(
        UnsupportedArgumentError, match=r"`\$WORLD_SIZE` to be 1.*got '2'.*set use_cpu=True"
    ):
        make(output_dir, use_cpu=False)
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    make(output_dir, use_cpu=False)


def test_accelerate_launch_that_starts_one_process_instead_of_two_is_refused(
    output_dir, monkeypatch
):
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "ACCELERATE_USE_CPU": "True",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UnsupportedArgumentError, match=r"--num_processes.*Use `torchrun"):
        make(output_dir)


def test_fsdp_is_refused_where_accelerate_would_not_shard(output_dir):
    with pytest.raises(UnsupportedArgumentError, match="`fsdp` to be unset on a CPU.*fully_shard"):
        make(output_dir, fsdp=True)


def test_data_parallel_is_refused(output_dir, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(
        UnsupportedArgumentError, match=r"`n_gpu` to be at most 1.*CUDA_VISIBLE_DEVICES"
    ):
        make(output_dir)
    assert make(output_dir, **PUBLIC).n_gpu == 2


def test_arguments_assigned_later_are_found_by_check(output_dir):
    args = make(output_dir)
    args.fp16 = True
    args.gradient_accumulation_steps = 4
    with pytest.raises(
        UnsupportedArgumentError, match=r"(?s)`gradient_accumulation_steps`.*`fp16`"
    ):
        args.check()


def test_round_trip_through_a_dict(output_dir):
    args = make(output_dir, release=["training_loss"], target_delta=1e-6, eval_strategy="epoch")
    again = DPTrainingArguments(**args.to_dict())
    assert again.to_dict() == args.to_dict()
    assert dataclasses.replace(args, noise_multiplier=2.0).noise_multiplier == 2.0
    assert '"release": [' in args.to_json_string()


def test_built_from_training_arguments(output_dir):
    plain = TrainingArguments(
        output_dir=str(output_dir), use_cpu=True, learning_rate=1e-3
    ).to_dict()
    assert DPTrainingArguments(**plain, privacy_mode="non_private").learning_rate == 1e-3
    private = {"target_epsilon": 3.0, "expected_batch_size": 4}
    with pytest.raises(
        UnsupportedArgumentError, match="`max_grad_norm`.*got 1.0"
    ):  # not what a private run means
        DPTrainingArguments(**plain, **private)
    assert DPTrainingArguments(**plain | {"max_grad_norm": None}, **private).max_grad_norm == 0.0


def test_command_line(output_dir):
    parser = HfArgumentParser(DPTrainingArguments)
    line = (
        "--target_epsilon 8 --expected_batch_size 16 --release training_loss "
        "--clip_noised_gradient --max_grad_norm 1"
    )
    (args,) = parser.parse_args_into_dataclasses(
        ["--output_dir", str(output_dir), "--use_cpu", *line.split()]
    )
    assert (args.target_epsilon, args.expected_batch_size, args.max_grad_norm) == (8.0, 16, 1.0)
    assert (args.release, args.clip_noised_gradient, args.noise_multiplier) == (
        ["training_loss"],
        True,
        None,
    )


def test_help_of_the_command_line(capsys):
    parser = HfArgumentParser(DPTrainingArguments)
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for field in OWN:
        assert f"--{field.name}" in shown


def test_every_field_stands_in_the_docstring_once_with_its_help():
    text = DPTrainingArguments.__doc__
    documented = re.findall(r"^        (\w+) \(`.*\):$", text, flags=re.MULTILINE)
    assert len(documented) == len(set(documented))
    declared = {field.name for group in (*GROUPS, OtherDefaults) for field in own_fields(group)}
    assert set(documented) == declared >= {field.name for field in OWN}
    assert "target_epsilon (`float`, *optional*):\n            Epsilon to spend" in text
    for field in dataclasses.fields(DPTrainingArguments):
        if field.name in declared:
            assert field.metadata["help"].endswith("."), field.name
            assert not re.search(r"(?<!%)%(?!%)", field.metadata["help"]), field.name


def test_every_check_is_of_a_field_of_its_group():
    for group in GROUPS:
        assert group.CHECKS.keys() <= {field.name for field in own_fields(group)}
    unchecked = {
        field.name
        for group in GROUPS
        for field in own_fields(group)
        if field.name not in group.CHECKS and field.type not in ("bool", bool)
    }
    assert unchecked == {"privacy_mode", "representation_module"}  # checked first; by the model


def test_several_bad_arguments_of_one_group_are_reported_at_once(output_dir):
    with pytest.raises(InvalidArgumentError, match="3 arguments") as error:
        make(output_dir, **USERS, max_rows_per_unit=0, unit_reduction="x", unit_sampling="y")
    assert all(name in str(error.value) for name in ("max_rows_per_unit", "unit_reduction"))
    with pytest.raises(InvalidArgumentError, match="2 arguments.*\n.*canaries.*\n.*scores"):
        make(output_dir, audit_canaries=0, audit_scores="x")
