"""What a private run does with each argument of ``transformers.TrainingArguments``.

The table has one row for each field, without exception. Guarantee: in private modes, a setting that
would break the privacy statement is refused by name, before anything in the process is touched. A
field that the table does not know (of a newer transformers) is refused unless it has its default.
What may still change once a trainer was made of the arguments is marked ``free``.

The predicates read raw values (as given, before transformers parses them) as well as parsed ones.
Rows cover transformers >= 5.20, < 6. ``VERSION_DEPENDENT`` names the fields that only some of these
versions have.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations

from hf_dp._dataclasses import default_of
from hf_dp._validate import invalid
from hf_dp.errors import InvalidArgumentError, UnsupportedArgumentError

# The trackers that send what is logged, and the variables by which each may send more. These are
# checked only when `report_to` names the tracker.
TRACKERS: Mapping[str, tuple[str, ...]] = {
    "tensorboard": (),
    "trackio": (),
    "azure_ml": (),
    "kubeflow": (),
    "neptune": (),
    "wandb": ("WANDB_WATCH", "WANDB_LOG_MODEL"),
    "mlflow": ("HF_MLFLOW_LOG_ARTIFACTS",),
    "dagshub": ("HF_MLFLOW_LOG_ARTIFACTS", "HF_DAGSHUB_LOG_ARTIFACTS"),
    "comet_ml": ("COMET_LOG_ASSETS",),
    "clearml": ("CLEARML_LOG_MODEL",),
    "dvclive": ("HF_DVCLIVE_LOG_MODEL",),
    "swanlab": ("SWANLAB_LOG_MODEL",),
}


class Verdict(Enum):
    """What a private run does with an argument."""

    WORKS = "works"  # does what transformers documents, and the privacy statement holds
    NEUTRAL = "neutral"  # accepted; in a private run it changes nothing
    # Some of its values would break the privacy statement, or would be ignored silently.
    REFUSED = "refused"


@dataclasses.dataclass(frozen=True)
class ArgumentRow:
    """One row of the table: the verdict and its reason.

    A ``REFUSED`` row also says which values are refused, what is expected, and the next move.
    ``free`` arguments are read when they are used, and by neither plan, checks nor statement: they
    may change once the trainer exists.
    """

    verdict: Verdict
    reason: str
    refuses: Callable[[Any], bool] | None = None
    expected: str = ""
    next_move: str = ""
    free: bool = False

    def problem(
        self, name: str, value: object, where: str = "in private modes"
    ) -> InvalidArgumentError | None:
        """Return the error for this value, or None if the value is fine; the caller raises it."""
        if self.refuses is None or not self.refuses(value):
            return None
        move = f"{self.reason} {self.next_move}"
        return invalid(name, value, f"{self.expected} {where}", move, UnsupportedArgumentError)


def _works(reason: str) -> ArgumentRow:
    return ArgumentRow(Verdict.WORKS, reason)


def _free(reason: str) -> ArgumentRow:
    return ArgumentRow(Verdict.WORKS, reason, free=True)


def _neutral(reason: str) -> ArgumentRow:
    return ArgumentRow(Verdict.NEUTRAL, reason)


def _refused(
    refuses: Callable[[Any], bool], expected: str, reason: str, next_move: str
) -> ArgumentRow:
    return ArgumentRow(Verdict.REFUSED, reason, refuses, expected, next_move)


# --- predicates ---


def _plain(value: object) -> object:
    """Return the value of an enum member; return anything else unchanged."""
    return value.value if isinstance(value, Enum) else value


def _is_set(value: object) -> bool:
    return value is not None


def _is_on(value: object) -> bool:
    return bool(value)


def _other_than(*allowed: object) -> Callable[[Any], bool]:
    return lambda value: _plain(value) not in allowed


def _as_dict(value: object) -> Mapping[str, Any]:
    """Read a dict argument in any form that transformers takes.

    The forms are a dict, JSON text, the path of a JSON file, and a parsed config object. What
    cannot be read counts as empty here; ``TrainingArguments`` refuses it with its own message a
    moment later.
    """
    if isinstance(value, Mapping):
        return value
    if isinstance(value, str):
        try:
            loaded = json.loads(
                value if value.lstrip().startswith("{") else Path(value).read_text(encoding="utf-8")
            )
        except (OSError, ValueError):
            return {}
        return loaded if isinstance(loaded, dict) else {}
    to_dict = getattr(value, "to_dict", None)
    return to_dict() if callable(to_dict) else {}


def _truthy(value: object) -> bool:
    """Return whether a value is true, or the text "true", which transformers converts in JSON."""
    return value.lower() == "true" if isinstance(value, str) else bool(value)


def _is_unlike_one_backward(value: object) -> bool:
    options = _as_dict(value)
    return _truthy(options.get("use_reentrant")) or options.get("preserve_rng_state", True) in (
        False,
        "false",
        "False",
        0,
    )


def _other_than_fsdp2(value: object) -> bool:
    config = _as_dict(value)
    version = config.get("version", config.get("fsdp_version", 2))
    return version not in (2, "2") or any(bool(config.get(name)) for name in ("xla", "xla_fsdp_v2"))


def _reshapes_batches(value: object) -> bool:
    config = _as_dict(value)
    return (
        _truthy(config.get("split_batches"))
        or _truthy(config.get("dispatch_batches"))
        or not _truthy(config.get("even_batches", True))
        or _truthy(config.get("use_configured_state"))
        or bool(config.get("gradient_accumulation_kwargs"))
    )


# Optimizers that step after the backward pass, from `.grad`. What they do is post-processing of the
# noised gradient.
STEPPING_OPTIMIZERS = frozenset(
    """adamw_torch adamw_torch_fused adamw_torch_xla adamw_torch_npu_fused adamw_torch_4bit
    adamw_torch_8bit adamw_anyprecision adamw_bnb_8bit adamw_8bit paged_adamw_32bit
    paged_adamw_8bit adafactor ademamix ademamix_8bit paged_ademamix_32bit paged_ademamix_8bit
    sgd adagrad lion_8bit lion_32bit paged_lion_32bit paged_lion_8bit rmsprop rmsprop_bnb
    rmsprop_bnb_8bit rmsprop_bnb_32bit galore_adamw galore_adamw_8bit galore_adafactor
    apollo_adamw grokadamw schedule_free_radam schedule_free_adamw schedule_free_sgd
    stable_adamw""".split()
)
# Optimizers that step parameter by parameter inside the backward pass, before any noise is added.
STEPPING_IN_BACKWARD = frozenset(
    """lomo adalomo galore_adamw_layerwise galore_adamw_8bit_layerwise galore_adafactor_layerwise
    apollo_adamw_layerwise""".split()
)

# --- rows that several fields share ---

_SCRIPT_FLAG = _free("Read by scripts, not by the Trainer.")
_EVALUATION = _free("Concerns evaluation only; epsilon does not cover evaluation data.")
_LOGGING = _free(
    "Only what may leave is logged: un-noised quantities are left out unless named in `release`."
)
_TRACKER = _free(
    "Names where the tracker stores what is logged; the log is filtered before it gets there."
)
_SAVING = _free("A checkpoint holds released (noised) weights and a copy of the ledger.")
_HUB = _free("A push is one commit of weights, configuration, card and ledger, by an allow-list.")
_AFTER_NOISE = _works("Acts on the noised gradient: post-processing.")
_LOADER = _free("Concerns how examples are fetched, not which ones are drawn.")
_NO_DDP = _neutral(
    "hf_dp adds up the clipped sums of the processes itself, once per step, without "
    "DistributedDataParallel."
)
_PROCESSES = _free("Says how processes find each other or what they log, not what they draw.")
_PRECISION_16 = "fp16 scales the loss and skips steps on overflow, which depends on the data."
_COMPILE = _refused(
    _is_set,
    "to be None",
    "It turns on `torch_compile`, whose graphs bypass the clipping engine.",
    "Remove it.",
)
_CHECKPOINTING_KWARGS = _refused(
    _is_unlike_one_backward,
    "to have use_reentrant=False and preserve_rng_state=True",
    "The reentrant form runs its own backward pass, outside the clipping engine. Without the "
    "random state, the recomputed forward pass has other dropout masks, and its gradients belong "
    "to no loss.",
    "Remove both options.",
)
_CHECKPOINTING = _works(
    "The non-reentrant form recomputes activations inside the engine's one backward pass."
)

ARGUMENT_TABLE: Mapping[str, ArgumentRow] = {
    # duration and batch size
    "output_dir": _free("Also holds the ledger of the run."),
    "per_device_train_batch_size": _free(
        "The physical batch: memory only, never part of the privacy statement."
    ),
    "num_train_epochs": _works("Becomes a number of steps in PrivacyPlan."),
    "max_steps": _works("If above 0, the number of private steps."),
    "auto_find_batch_size": _refused(
        _is_on,
        "to be False",
        "After an out-of-memory error it restarts training from changed weights, and no plan "
        "counts these steps.",
        "Set `auto_physical_batch_size=True`, which finds the size that fits before training.",
    ),
    "gradient_accumulation_steps": _refused(
        _other_than(1),
        "to be 1",
        "One step already accumulates a whole logical batch, and noise is added once for it.",
        "Set `expected_batch_size` for the logical batch and `per_device_train_batch_size` for "
        "memory.",
    ),
    "average_tokens_across_devices": _neutral(
        "Set to False: dividing by a count of label tokens makes one example's gradient depend on "
        "its neighbors."
    ),
    # optimizer and schedule
    "learning_rate": _AFTER_NOISE,
    "lr_scheduler_type": _works(
        "A function of the step, or (reduce_lr_on_plateau, greedy) of evaluation metrics."
    ),
    "lr_scheduler_kwargs": _works("Parameters of the schedule."),
    "warmup_steps": _works("Counts private steps; below 1, a share of them."),
    "optim": _refused(
        lambda value: _plain(value) not in STEPPING_OPTIMIZERS,
        "to be an optimizer that steps after the backward pass",
        "LOMO and layerwise optimizers step inside the backward pass, before clipping and noise. "
        "An optimizer that is not known here might as well.",
        'Use "adamw_torch", "sgd", "adafactor" or another optimizer that is not layerwise.',
    ),
    "optim_args": _AFTER_NOISE,
    "optim_target_modules": _AFTER_NOISE,
    "weight_decay": _works("A function of the released weights."),
    "adam_beta1": _AFTER_NOISE,
    "adam_beta2": _AFTER_NOISE,
    "adam_epsilon": _AFTER_NOISE,
    "max_grad_norm": _works(
        "Clips the noised averaged gradient; above 0 only with `clip_noised_gradient=True`."
    ),
    # what changes the loss
    "label_smoothing_factor": _refused(
        _other_than(0, None),
        "to be 0",
        "The Trainer's label smoother averages over the whole batch, so an example's loss depends "
        "on its neighbors.",
        "Remove it.",
    ),
    "neftune_noise_alpha": _refused(
        _is_set,
        "to be None",
        "Its noise is drawn from a public seed and scaled by the padded length, which depends on "
        "the longest neighbor.",
        "Remove it.",
    ),
    "use_liger_kernel": _refused(
        _is_on,
        "to be False",
        "Fused kernels hide the layers from the clipping engine and the logits from the "
        "per-example loss.",
        "Remove it.",
    ),
    "liger_kernel_config": _neutral("Read only with `use_liger_kernel`, which is refused."),
    # precision, memory and compilation
    "bf16": _works(
        "Activations are bfloat16; norms and sums are formed in float32. Only examples that are "
        "padded alike share a physical batch."
    ),
    "fp16": _refused(_is_on, "to be False", _PRECISION_16, "Use bf16=True, or full precision."),
    "bf16_full_eval": _EVALUATION,
    "fp16_full_eval": _EVALUATION,
    "tf32": _works(
        "Products in forward and backward are rounded to 10 bits; norms and sums are formed in "
        "float32. Only examples that are padded alike share a physical batch."
    ),
    "activation_checkpointing": _CHECKPOINTING,
    "activation_checkpointing_kwargs": _CHECKPOINTING_KWARGS,
    "gradient_checkpointing": _CHECKPOINTING,
    "gradient_checkpointing_kwargs": _CHECKPOINTING_KWARGS,
    "torch_compile": _refused(
        _is_on,
        "to be False",
        "Compiled graphs bypass the clipping engine.",
        "Remove it; compile for inference only.",
    ),
    "torch_compile_backend": _COMPILE,
    "torch_compile_mode": _COMPILE,
    "use_cache": _works("A setting of the model; keys and values are kept per example."),
    "torch_empty_cache_steps": _refused(
        _is_set,
        "to be None",
        "It acts inside the training step that the private step replaces, so it would be silently "
        "ignored.",
        "Remove it; to save memory, lower `per_device_train_batch_size`.",
    ),
    # logging
    "logging_strategy": _LOGGING,
    "logging_steps": _LOGGING,
    "logging_first_step": _LOGGING,
    "log_on_each_node": _PROCESSES,
    "logging_nan_inf_filter": _neutral("The loss handed to the Trainer is a constant, never NaN."),
    "include_num_input_tokens_seen": _refused(
        _other_than(False, None, "no"),
        'to be "no"',
        "The number of tokens seen reveals the size of each secret draw.",
        "Remove it.",
    ),
    "log_level": _free("How much is printed, not what is measured."),
    "log_level_replica": _PROCESSES,
    "disable_tqdm": _free(
        "The bar shows steps and time on the local screen; epsilon does not cover timing."
    ),
    "report_to": _refused(
        lambda value: not _trackers(value) <= {*TRACKERS, "none"},
        f"to be among {', '.join(TRACKERS)}, none",
        "Only these are known to send what is logged and, by their switches, nothing else: another "
        "may upload checkpoints or the output folder, or measure what tells the sizes of draws.",
        "Choose one of them.",
    ),
    "run_name": _TRACKER,
    "project": _TRACKER,
    "trackio_space_id": _TRACKER,
    "trackio_bucket_id": _TRACKER,
    "trackio_static_space_id": _TRACKER,
    "skip_memory_metrics": _refused(
        _other_than(True),
        "to be True",
        "Peak memory reveals the size and the longest example of each secret draw.",
        "Remove it; `hf-dp bench memory` measures on synthetic data.",
    ),
    "debug": _refused(
        _is_on,
        "to be empty",
        "Its reports print activations and counts of private examples.",
        "Remove it; debug on public data with privacy_mode='non_private'.",
    ),
    # evaluation
    "eval_strategy": _EVALUATION,
    "eval_steps": _EVALUATION,
    "eval_delay": _EVALUATION,
    "per_device_eval_batch_size": _EVALUATION,
    "prediction_loss_only": _EVALUATION,
    "eval_on_start": _EVALUATION,
    "eval_do_concat_batches": _EVALUATION,
    "eval_use_gather_object": _EVALUATION,
    "eval_accumulation_steps": _EVALUATION,
    "include_for_metrics": _EVALUATION,
    "batch_eval_metrics": _EVALUATION,
    "load_best_model_at_end": _works(
        "Looks at evaluation metrics only; the statement says that epsilon does not cover it."
    ),
    "metric_for_best_model": _EVALUATION,
    "greater_is_better": _EVALUATION,
    # saving and resuming
    "save_only_model": _free(
        "Such a checkpoint cannot be resumed; the ledger of the run is kept nevertheless."
    ),
    "save_strategy": _works(_SAVING.reason),  # "best" selects, and the statement says so
    "save_steps": _SAVING,
    "save_on_each_node": _refused(
        _is_on,
        "to be False",
        "One process keeps the ledger that goes with the weights.",
        "Use a folder that all machines share, or copy what rank 0 saved.",
    ),
    "save_total_limit": _free("Deletes checkpoints, never the ledger in `output_dir`."),
    "enable_jit_checkpoint": _refused(
        _is_on,
        "to be False",
        "A private run saves a checkpoint on SIGTERM by itself, aside, so that no half of one is "
        "taken for a checkpoint.",
        "Remove it.",
    ),
    "ignore_data_skip": _neutral(
        "Every logical batch is a fresh draw, so there is nothing to skip."
    ),
    "restore_callback_states_from_checkpoint": _free(
        "Callbacks hold no privacy state; the ledger does."
    ),
    "resume_from_checkpoint": _free("Read by scripts; resuming needs the ledger of the run."),
    # hub
    "push_to_hub": _HUB,
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _refused(
        lambda value: _plain(value) in ("checkpoint", "all_checkpoints"),
        'to be "end" or "every_save"',
        "It also pushes the optimizer, random and trainer state of checkpoints, which the card "
        "does not list.",
        'Use hub_strategy="end", and keep checkpoints local.',
    ),
    "hub_always_push": _free("Pushes end before training goes on, so none is under way at a save."),
    "hub_revision": _HUB,
    # randomness
    "seed": _works(
        "Governs only what no data touches: the initialization of heads and adapters. Draws and "
        "noise are secret."
    ),
    "full_determinism": _works(
        "Makes kernels deterministic and seeds public generators; draws and noise stay secret."
    ),
    "data_seed": _refused(
        _is_set,
        "to be None",
        "Which examples are drawn must stay secret; a seed in training_args.bin would publish it.",
        "Remove it; for a reproducible test that is not private, use `insecure_seed`.",
    ),
    # hardware and accelerate
    "use_cpu": _works("Chooses the device."),
    "accelerator_config": _refused(
        _reshapes_batches,
        "to leave split_batches, dispatch_batches, even_batches, use_configured_state and "
        "gradient_accumulation_kwargs at their defaults",
        "These options reshape the drawn batches, or bring in settings that are not checked here.",
        "Remove them; `non_blocking` may stay.",
    ),
    "parallelism_config": _refused(
        _is_set,
        "to be None",
        "With tensor, context or pipeline parallelism a process sees only a part of each example's "
        "gradient, so its norm is not known.",
        "Remove it; FSDP2 (`fsdp`) spreads the weights without splitting examples.",
    ),
    # data
    "dataloader_drop_last": _refused(
        _is_on,
        "to be False",
        "Batches are Poisson draws of varying size. Dropping one would change the sampling that "
        "the accountant counts on.",
        "Remove it.",
    ),
    "dataloader_num_workers": _free(
        "Draws happen in the main process; worker seeds come from the operating system."
    ),
    "dataloader_pin_memory": _LOADER,
    "dataloader_persistent_workers": _LOADER,
    "dataloader_prefetch_factor": _LOADER,
    "dataloader_multiprocessing_context": _LOADER,
    "dataloader_in_order": _refused(
        _other_than(True, None),
        "to be True",
        "Small draws would overtake large ones, so the batch of a step would depend on the data.",
        "Remove it.",
    ),
    "remove_unused_columns": _works("Says which columns of a row are looked over and trained on."),
    "label_names": _works("Names the label columns of evaluation and of the per-example loss."),
    "train_sampling_strategy": _refused(
        _other_than("random", None),
        'to be "random"',
        "Every logical batch is a Poisson draw. Another order would void the sampling that the "
        "accountant counts on.",
        "Remove it; physical batches are sorted by length anyway.",
    ),
    "length_column_name": _neutral("Read only by sampling strategies that are refused."),
    # distribution
    "ddp_find_unused_parameters": _NO_DDP,
    "ddp_bucket_cap_mb": _NO_DDP,
    "ddp_broadcast_buffers": _NO_DDP,
    "ddp_static_graph": _NO_DDP,
    "ddp_backend": _PROCESSES,
    "ddp_timeout": _PROCESSES,
    "local_rank": _PROCESSES,
    "fsdp": _works("Norms stay in one process; clipped sums are added up over the shards."),
    "fsdp_config": _refused(
        _other_than_fsdp2,
        'to have "version": 2, and "xla": false',
        "FSDP1 joins the parameters of many layers in one flat tensor, and XLA shards behind the "
        "clipping engine's back.",
        'Set "version": 2.',
    ),
    "deepspeed": _refused(
        _is_on,
        "to be None",
        "DeepSpeed owns the backward pass, the clipping and the step.",
        "Remove it; if memory is short, train fewer parameters with `peft_config`.",
    ),
    # flags of scripts
    "do_train": _SCRIPT_FLAG,
    "do_eval": _SCRIPT_FLAG,
    "do_predict": _SCRIPT_FLAG,
}

# Rows whose field is missing in some versions of transformers in the range (both came with 5.23).
VERSION_DEPENDENT = frozenset({"activation_checkpointing", "activation_checkpointing_kwargs"})

# --- the environment: what accelerate, launchers and trackers read from it ---


def _flag(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off", "n", "f")


def _flag_row(reason: str) -> ArgumentRow:
    return _refused(
        _flag,
        "to be unset or false",
        reason,
        "Unset it, or choose another accelerate configuration.",
    )


ENVIRONMENT_TABLE: Mapping[str, ArgumentRow] = {
    "ACCELERATE_MIXED_PRECISION": _refused(
        lambda value: value.lower() not in ("", "no", "bf16"),
        'to be "no" or "bf16"',
        _PRECISION_16,
        'Use "bf16".',
    ),
    "ACCELERATE_DYNAMO_BACKEND": _refused(
        lambda value: value.lower() not in ("", "no"),
        'to be "no"',
        "Compiled graphs bypass the clipping engine.",
        "Unset it.",
    ),
    "ACCELERATE_USE_DEEPSPEED": _flag_row(
        "DeepSpeed owns the backward pass, the clipping and the step."
    ),
    "ACCELERATE_USE_FSDP": _refused(
        lambda value: _flag(value) and os.environ.get("FSDP_VERSION", "1") != "2",
        "to go with $FSDP_VERSION 2",
        "FSDP1 joins the parameters of many layers in one flat tensor.",
        "Set `fsdp_version: 2` in the accelerate configuration.",
    ),
    "ACCELERATE_USE_MEGATRON_LM": _flag_row(
        "Megatron-LM owns the backward pass, the clipping and the step."
    ),
    "ACCELERATE_USE_PARALLELISM_CONFIG": _flag_row(
        "With tensor, context or pipeline parallelism a process sees only a part of each example's "
        "gradient, so its norm is not known."
    ),
    "WANDB_WATCH": _refused(
        lambda value: value.lower() in ("gradients", "all"),
        'to be "false" or "parameters"',
        "It hooks gradients, and would publish them without noise.",
        "Unset it.",
    ),
    "WANDB_LOG_MODEL": _refused(
        lambda value: value.lower() == "checkpoint",
        'to be "false" or "end"',
        "It uploads whole checkpoints: optimizer, random and trainer state, which the card does "
        "not list.",
        'Use "end".',
    ),
    **{
        name: _refused(
            lambda value: value.lower() not in ("", "false", "0", "no", "off"),
            'to be "false"',
            "It uploads checkpoints or the output folder: optimizer, random and trainer state and "
            "digests of private rows, which the card does not list.",
            'Set it to "false".',
        )
        for name in (
            "HF_MLFLOW_LOG_ARTIFACTS",
            "HF_DAGSHUB_LOG_ARTIFACTS",
            "COMET_LOG_ASSETS",
            "CLEARML_LOG_MODEL",
            "HF_DVCLIVE_LOG_MODEL",
            "SWANLAB_LOG_MODEL",
        )
    },
}
_UPLOADS_IF_UNSET = {"CLEARML_LOG_MODEL": "TRUE"}  # the callback's own default

# --- checks ---


def _row_of_an_unknown(field: dataclasses.Field[Any]) -> ArgumentRow:
    """Make the row of a field that came with a newer transformers: only its default is accepted."""
    default = default_of(field)
    return _refused(
        lambda value: value != default,
        f"to be {default!r}",
        "This transformers is newer than hf_dp, which does not know what the argument does.",
        "Remove it, or use an older version of transformers.",
    )


def fields_without_a_row(
    arguments_class: type[TrainingArguments] = TrainingArguments,
    more: Mapping[str, ArgumentRow] = MappingProxyType({}),
) -> list[str]:
    """List the fields of this class that neither the table nor ``more`` knows, in their order."""
    known = {**ARGUMENT_TABLE, **more}
    return [field.name for field in dataclasses.fields(arguments_class) if field.name not in known]


def table_problems(
    args: TrainingArguments,
    arguments_class: type[TrainingArguments] = TrainingArguments,
    more: Mapping[str, ArgumentRow] = MappingProxyType({}),
) -> dict[str, InvalidArgumentError]:
    """Return the problems of a private run with these values, by argument.

    Only the fields of ``arguments_class`` are read. ``more`` are rows of fields that
    ``TrainingArguments`` does not have.
    """
    problems: dict[str, InvalidArgumentError] = {}
    known = {**ARGUMENT_TABLE, **more}
    for field in dataclasses.fields(arguments_class):
        value = getattr(args, field.name)
        row = known.get(field.name) or _row_of_an_unknown(field)
        problem = row.problem(field.name, value)
        if problem is not None:
            problems[field.name] = problem
    return problems


def _trackers(report_to: Any) -> set[str]:
    """Return the names in ``report_to``, in any form that transformers takes."""
    names = {report_to} if isinstance(report_to, str) else set(report_to or ())
    return set(get_available_reporting_integrations()) if names == {"all"} else names


def environment_problems(report_to: object) -> dict[str, InvalidArgumentError]:
    """Return the problems with environment variables of a private run, by variable.

    ``report_to`` names the trackers that the run reports to.
    """
    read = {name for tracker in _trackers(report_to) for name in TRACKERS.get(tracker, ())}
    of_trackers = {name for names in TRACKERS.values() for name in names}
    problems: dict[str, InvalidArgumentError] = {}
    for name, row in ENVIRONMENT_TABLE.items():
        value = os.environ.get(name, _UPLOADS_IF_UNSET.get(name))
        if value is None or (name in of_trackers and name not in read):
            continue
        problem = row.problem(f"${name}", value)
        if problem is not None:
            problems[name] = problem
    return problems
