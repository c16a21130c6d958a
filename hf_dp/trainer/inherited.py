"""What a private run does with each argument of ``transformers.TrainingArguments``.

An argument works as documented (``WORKS``, and ``FREE`` where it may still change once a trainer
was made), or some of its values are refused (``REFUSED``). Guarantee: in private modes, a setting
that would break the privacy statement is refused by name, before anything in the process is
touched. An argument that is in none of them (of a newer transformers) is refused unless it has its
default.

The predicates read raw values (as given, before transformers parses them) as well as parsed ones.
The names cover transformers >= 5.20, < 6; ``VERSION_DEPENDENT`` are those that only some of these
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

from hf_dp._arguments import Problems
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


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Which values of an argument are refused, what is expected, why, and the next move."""

    refuses: Callable[[Any], bool]
    expected: str
    reason: str
    next_move: str = "Remove it."

    def problem(
        self, name: str, value: object, where: str = "in private modes"
    ) -> InvalidArgumentError | None:
        """Return the error for this value, or None if the value is fine; the caller raises it."""
        if not self.refuses(value):
            return None
        move = f"{self.reason} {self.next_move}"
        return invalid(name, value, f"{self.expected} {where}", move, UnsupportedArgumentError)


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

# Read when they are used, and by neither plan, checks nor statement: they may change once the
# trainer exists. Logs are filtered, a checkpoint and a push hold released weights and the ledger,
# and epsilon covers neither evaluation data nor timing.
FREE = frozenset(
    """
    output_dir per_device_train_batch_size bf16_full_eval fp16_full_eval logging_strategy
    logging_steps logging_first_step log_on_each_node log_level log_level_replica disable_tqdm
    run_name project trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy
    eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start
    eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics
    batch_eval_metrics metric_for_best_model greater_is_better save_only_model save_steps
    save_total_limit restore_callback_states_from_checkpoint resume_from_checkpoint push_to_hub
    hub_token hub_private_repo hub_model_id hub_always_push hub_revision dataloader_num_workers
    dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context ddp_backend ddp_timeout local_rank do_train do_eval
    do_predict
    """.split()
)
# What acts on the noised gradient, on released weights, or on nothing that is drawn; or what a
# private run does not read: it sets average_tokens_across_devices to False, adds up the sums of
# processes without DistributedDataParallel, and seeds draws and noise in secret, whatever `seed`
# says.
WORKS = frozenset(
    """
    num_train_epochs max_steps average_tokens_across_devices learning_rate lr_scheduler_type
    lr_scheduler_kwargs warmup_steps optim_args optim_target_modules weight_decay adam_beta1
    adam_beta2 adam_epsilon max_grad_norm liger_kernel_config bf16 tf32 activation_checkpointing
    gradient_checkpointing use_cache logging_nan_inf_filter load_best_model_at_end save_strategy
    ignore_data_skip seed full_determinism use_cpu remove_unused_columns label_names
    length_column_name ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers
    ddp_static_graph fsdp
    """.split()
)

_PRECISION_16 = "fp16 scales the loss and skips steps on overflow, which depends on the data."
_COMPILE = Refusal(
    _is_set,
    "to be None",
    "It turns on `torch_compile`, whose graphs bypass the clipping engine.",
    "Remove it.",
)
_CHECKPOINTING_KWARGS = Refusal(
    _is_unlike_one_backward,
    "to have use_reentrant=False and preserve_rng_state=True",
    "The reentrant form runs its own backward pass, outside the clipping engine. Without the "
    "random state, the recomputed forward pass has other dropout masks, and its gradients belong "
    "to no loss.",
    "Remove both options.",
)
REFUSED: Mapping[str, Refusal] = {
    "auto_find_batch_size": Refusal(
        _is_on,
        "to be False",
        "After an out-of-memory error it restarts training from changed weights, and no plan "
        "counts these steps.",
        "Set `auto_physical_batch_size=True`, which finds the size that fits before training.",
    ),
    "gradient_accumulation_steps": Refusal(
        _other_than(1),
        "to be 1",
        "One step already accumulates a whole logical batch, and noise is added once for it.",
        "Set `expected_batch_size` for the logical batch and `per_device_train_batch_size` for "
        "memory.",
    ),
    "optim": Refusal(
        lambda value: _plain(value) not in STEPPING_OPTIMIZERS,
        "to be an optimizer that steps after the backward pass",
        "LOMO and layerwise optimizers step inside the backward pass, before clipping and noise. "
        "An optimizer that is not known here might as well.",
        'Use "adamw_torch", "sgd", "adafactor" or another optimizer that is not layerwise.',
    ),
    "label_smoothing_factor": Refusal(
        _other_than(0, None),
        "to be 0",
        "The Trainer's label smoother averages over the whole batch, so an example's loss depends "
        "on its neighbors.",
        "Remove it.",
    ),
    "neftune_noise_alpha": Refusal(
        _is_set,
        "to be None",
        "Its noise is drawn from a public seed and scaled by the padded length, which depends on "
        "the longest neighbor.",
        "Remove it.",
    ),
    "use_liger_kernel": Refusal(
        _is_on,
        "to be False",
        "Fused kernels hide the layers from the clipping engine and the logits from the "
        "per-example loss.",
        "Remove it.",
    ),
    "fp16": Refusal(_is_on, "to be False", _PRECISION_16, "Use bf16=True, or full precision."),
    "activation_checkpointing_kwargs": _CHECKPOINTING_KWARGS,
    "gradient_checkpointing_kwargs": _CHECKPOINTING_KWARGS,
    "torch_compile": Refusal(
        _is_on,
        "to be False",
        "Compiled graphs bypass the clipping engine.",
        "Remove it; compile for inference only.",
    ),
    "torch_compile_backend": _COMPILE,
    "torch_compile_mode": _COMPILE,
    "torch_empty_cache_steps": Refusal(
        _is_set,
        "to be None",
        "It acts inside the training step that the private step replaces, so it would be silently "
        "ignored.",
        "Remove it; to save memory, lower `per_device_train_batch_size`.",
    ),
    "include_num_input_tokens_seen": Refusal(
        _other_than(False, None, "no"),
        'to be "no"',
        "The number of tokens seen reveals the size of each secret draw.",
        "Remove it.",
    ),
    "report_to": Refusal(
        lambda value: not _trackers(value) <= {*TRACKERS, "none"},
        f"to be among {', '.join(TRACKERS)}, none",
        "Only these are known to send what is logged and, by their switches, nothing else: another "
        "may upload checkpoints or the output folder, or measure what tells the sizes of draws.",
        "Choose one of them.",
    ),
    "skip_memory_metrics": Refusal(
        _other_than(True),
        "to be True",
        "Peak memory reveals the size and the longest example of each secret draw.",
        "Remove it; `hf-dp bench memory` measures on synthetic data.",
    ),
    "debug": Refusal(
        _is_on,
        "to be empty",
        "Its reports print activations and counts of private examples.",
        "Remove it; debug on public data with privacy_mode='non_private'.",
    ),
    "save_on_each_node": Refusal(
        _is_on,
        "to be False",
        "One process keeps the ledger that goes with the weights.",
        "Use a folder that all machines share, or copy what rank 0 saved.",
    ),
    "enable_jit_checkpoint": Refusal(
        _is_on,
        "to be False",
        "A private run saves a checkpoint on SIGTERM by itself, aside, so that no half of one is "
        "taken for a checkpoint.",
        "Remove it.",
    ),
    "hub_strategy": Refusal(
        lambda value: _plain(value) in ("checkpoint", "all_checkpoints"),
        'to be "end" or "every_save"',
        "It also pushes the optimizer, random and trainer state of checkpoints, which the card "
        "does not list.",
        'Use hub_strategy="end", and keep checkpoints local.',
    ),
    "data_seed": Refusal(
        _is_set,
        "to be None",
        "Which examples are drawn must stay secret; a seed in training_args.bin would publish it.",
        "Remove it; for a reproducible test that is not private, use `insecure_seed`.",
    ),
    "accelerator_config": Refusal(
        _reshapes_batches,
        "to leave split_batches, dispatch_batches, even_batches, use_configured_state and "
        "gradient_accumulation_kwargs at their defaults",
        "These options reshape the drawn batches, or bring in settings that are not checked here.",
        "Remove them; `non_blocking` may stay.",
    ),
    "parallelism_config": Refusal(
        _is_set,
        "to be None",
        "With tensor, context or pipeline parallelism a process sees only a part of each example's "
        "gradient, so its norm is not known.",
        "Remove it; FSDP2 (`fsdp`) spreads the weights without splitting examples.",
    ),
    "dataloader_drop_last": Refusal(
        _is_on,
        "to be False",
        "Batches are Poisson draws of varying size. Dropping one would change the sampling that "
        "the accountant counts on.",
        "Remove it.",
    ),
    "dataloader_in_order": Refusal(
        _other_than(True, None),
        "to be True",
        "Small draws would overtake large ones, so the batch of a step would depend on the data.",
        "Remove it.",
    ),
    "train_sampling_strategy": Refusal(
        _other_than("random", None),
        'to be "random"',
        "Every logical batch is a Poisson draw. Another order would void the sampling that the "
        "accountant counts on.",
        "Remove it; physical batches are sorted by length anyway.",
    ),
    "fsdp_config": Refusal(
        _other_than_fsdp2,
        'to have "version": 2, and "xla": false',
        "FSDP1 joins the parameters of many layers in one flat tensor, and XLA shards behind the "
        "clipping engine's back.",
        'Set "version": 2.',
    ),
    "deepspeed": Refusal(
        _is_on,
        "to be None",
        "DeepSpeed owns the backward pass, the clipping and the step.",
        "Remove it; if memory is short, train fewer parameters with `peft_config`.",
    ),
}

# Names that some versions of transformers in the range lack (both came with 5.23).
VERSION_DEPENDENT = frozenset({"activation_checkpointing", "activation_checkpointing_kwargs"})

# --- the environment: what accelerate, launchers and trackers read from it ---


def _flag(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off", "n", "f")


def _flag_refusal(reason: str) -> Refusal:
    return Refusal(
        _flag,
        "to be unset or false",
        reason,
        "Unset it, or choose another accelerate configuration.",
    )


ENVIRONMENT_TABLE: Mapping[str, Refusal] = {
    "ACCELERATE_MIXED_PRECISION": Refusal(
        lambda value: value.lower() not in ("", "no", "bf16"),
        'to be "no" or "bf16"',
        _PRECISION_16,
        'Use "bf16".',
    ),
    "ACCELERATE_DYNAMO_BACKEND": Refusal(
        lambda value: value.lower() not in ("", "no"),
        'to be "no"',
        "Compiled graphs bypass the clipping engine.",
        "Unset it.",
    ),
    "ACCELERATE_USE_DEEPSPEED": _flag_refusal(
        "DeepSpeed owns the backward pass, the clipping and the step."
    ),
    "ACCELERATE_USE_FSDP": Refusal(
        lambda value: _flag(value) and os.environ.get("FSDP_VERSION", "1") != "2",
        "to go with $FSDP_VERSION 2",
        "FSDP1 joins the parameters of many layers in one flat tensor.",
        "Set `fsdp_version: 2` in the accelerate configuration.",
    ),
    "ACCELERATE_USE_MEGATRON_LM": _flag_refusal(
        "Megatron-LM owns the backward pass, the clipping and the step."
    ),
    "ACCELERATE_USE_PARALLELISM_CONFIG": _flag_refusal(
        "With tensor, context or pipeline parallelism a process sees only a part of each example's "
        "gradient, so its norm is not known."
    ),
    "WANDB_WATCH": Refusal(
        lambda value: value.lower() in ("gradients", "all"),
        'to be "false" or "parameters"',
        "It hooks gradients, and would publish them without noise.",
        "Unset it.",
    ),
    "WANDB_LOG_MODEL": Refusal(
        lambda value: value.lower() == "checkpoint",
        'to be "false" or "end"',
        "It uploads whole checkpoints: optimizer, random and trainer state, which the card does "
        "not list.",
        'Use "end".',
    ),
    **{
        name: Refusal(
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


def unknown_fields(
    arguments_class: type[TrainingArguments] = TrainingArguments,
    known: frozenset[str] = frozenset(),
) -> list[dataclasses.Field[Any]]:
    """Return the fields of this class that neither this module nor ``known`` names."""
    all_known = WORKS | FREE | REFUSED.keys() | known
    return [each for each in dataclasses.fields(arguments_class) if each.name not in all_known]


def inherited_problems(
    args: TrainingArguments,
    arguments_class: type[TrainingArguments] = TrainingArguments,
    works: frozenset[str] = frozenset(),
    refused: Mapping[str, Refusal] = MappingProxyType({}),
) -> Problems:
    """Return the problems of a private run with these values, by argument.

    Only the fields of ``arguments_class`` are read. ``works`` and ``refused`` are about those that
    ``TrainingArguments`` does not have.
    """
    found = Problems(args)
    for field in unknown_fields(arguments_class, works | refused.keys()):
        default = default_of(field)
        if getattr(args, field.name) != default:
            found.unsupported(
                field.name,
                f"to be {default!r} in private modes",
                "This transformers is newer than hf_dp, which does not know what the argument "
                "does. Remove it, or use an older version of transformers.",
            )
    for name, refusal in {**REFUSED, **refused}.items():
        if name in arguments_class.__dataclass_fields__:
            problem = refusal.problem(name, getattr(args, name))
            if problem is not None:
                found[name] = problem
    return found


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
    for name, refusal in ENVIRONMENT_TABLE.items():
        value = os.environ.get(name, _UPLOADS_IF_UNSET.get(name))
        if value is None or (name in of_trackers and name not in read):
            continue
        problem = refusal.problem(f"${name}", value)
        if problem is not None:
            problems[name] = problem
    return problems
