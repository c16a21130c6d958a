"""What a private run does with each argument of ``transformers.TrainingArguments``.

An argument works as documented (``WORKS``, and ``FREE`` where it may still change once a trainer
was made), or keeps some values only (``REFUSED``). One that is in none of them, of a newer
transformers, is refused unless it has its default. So a setting that would break the privacy
statement is refused by name, before anything in the process is touched.

Checks read values as given and as transformers parsed them. The names cover transformers >= 5.20,
< 6; ``VERSION_DEPENDENT`` are those that only some of these versions have.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, fields, replace
from enum import Enum
from pathlib import Path

from transformers import TrainerCallback, TrainingArguments
from transformers.integrations import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

from hf_dp._arguments import Problems
from hf_dp._dataclasses import default_of


@dataclass(frozen=True)
class Refusal:
    """Which values of an argument are fine, in words, too, and why no others are."""

    accepts: Callable[[object], bool]
    expected: str
    why: str

    def note(self, name: str, found: Problems, where: str = "in private modes") -> None:
        """Note an argument that has another value."""
        if not self.accepts(found.value(name)):
            found.unsupported(name, f"{self.expected} {where}", self.why)


def only(why: str, *allowed: object) -> Refusal:
    """Return the refusal of all values but these."""
    named = [repr(each) for each in allowed if each is not None or allowed == (None,)]
    return Refusal(
        lambda value: (value.value if isinstance(value, Enum) else value) in allowed,
        f"to be {' or '.join(named)}",
        why,
    )


def options(why: str, **allowed: tuple[object, ...]) -> Refusal:
    """Return the refusal of all values of a dict's entries but these; the first is the default."""

    def accepts(value: object) -> bool:
        given = _as_dict(value)
        return all(
            str(given.get(name, values[0])).lower() in {str(each).lower() for each in values}
            for name, values in allowed.items()
        )

    shown = ", ".join(f"{name}={values[0]!r}" for name, values in allowed.items())
    return Refusal(accepts, f"to keep {shown}", why)


def _as_dict(value: object) -> Mapping[str, object]:
    """Read a dict, JSON text, the path of a JSON file, or a parsed config object; empty where
    transformers refuses it a moment later."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, str):
        try:
            inline = value.lstrip().startswith("{")
            loaded = json.loads(value if inline else Path(value).read_text(encoding="utf-8"))
            return dict(loaded)
        except (OSError, TypeError, ValueError):
            return {}
    to_dict = getattr(value, "to_dict", dict)
    return to_dict()


# The trackers that send what is logged, and the variables by which each may send more. These are
# checked only when `report_to` names the tracker, or when it is among the callbacks.
TRACKERS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("tensorboard", "trackio", "azure_ml", "kubeflow", "neptune"), ()),
    "wandb": ("WANDB_WATCH", "WANDB_LOG_MODEL"),
    "mlflow": ("HF_MLFLOW_LOG_ARTIFACTS",),
    "dagshub": ("HF_MLFLOW_LOG_ARTIFACTS", "HF_DAGSHUB_LOG_ARTIFACTS"),
    "comet_ml": ("COMET_LOG_ASSETS",),
    "clearml": ("CLEARML_LOG_MODEL",),
    "dvclive": ("HF_DVCLIVE_LOG_MODEL",),
    "swanlab": ("SWANLAB_LOG_MODEL",),
}


def _trackers(report_to: str | Iterable[str] | None) -> set[str]:
    """Return the names in ``report_to``, in any form that transformers takes."""
    names = {report_to} if isinstance(report_to, str) else set(report_to or ())
    return set(get_available_reporting_integrations()) if names == {"all"} else names


# Optimizers that step after the backward pass, from `.grad`. What they do is post-processing of the
# noised gradient.
STEPPING_OPTIMIZERS = tuple(
    """adamw_torch adamw_torch_fused adamw_torch_xla adamw_torch_npu_fused adamw_torch_4bit
    adamw_torch_8bit adamw_anyprecision adamw_bnb_8bit adamw_8bit paged_adamw_32bit
    paged_adamw_8bit adafactor ademamix ademamix_8bit paged_ademamix_32bit paged_ademamix_8bit
    sgd adagrad lion_8bit lion_32bit paged_lion_32bit paged_lion_8bit rmsprop rmsprop_bnb
    rmsprop_bnb_8bit rmsprop_bnb_32bit galore_adamw galore_adamw_8bit galore_adafactor
    apollo_adamw grokadamw schedule_free_radam schedule_free_adamw schedule_free_sgd
    stable_adamw""".split()
)
# Read when they are used, and by neither plan, checks nor statement: they may change once the
# trainer exists. Logs are filtered, a checkpoint and a push hold released weights and the ledger,
# and epsilon covers neither evaluation data nor timing.
FREE = frozenset(
    """output_dir per_device_train_batch_size bf16_full_eval fp16_full_eval logging_strategy
    logging_steps logging_first_step log_on_each_node log_level log_level_replica disable_tqdm
    run_name project trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy
    eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start
    eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics
    batch_eval_metrics metric_for_best_model greater_is_better save_only_model save_steps
    save_total_limit restore_callback_states_from_checkpoint resume_from_checkpoint push_to_hub
    hub_token hub_private_repo hub_model_id hub_always_push hub_revision dataloader_num_workers
    dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context ddp_backend ddp_timeout local_rank do_train do_eval
    do_predict""".split()
)
# What acts on the noised gradient, on released weights, or on nothing that is drawn; or what a
# private run does not read: it sets average_tokens_across_devices to False, adds up the sums of
# processes without DistributedDataParallel, and seeds draws and noise in secret, whatever `seed`
# says.
WORKS = frozenset(
    """num_train_epochs max_steps average_tokens_across_devices learning_rate lr_scheduler_type
    lr_scheduler_kwargs warmup_steps optim_args optim_target_modules weight_decay adam_beta1
    adam_beta2 adam_epsilon max_grad_norm liger_kernel_config bf16 tf32 activation_checkpointing
    gradient_checkpointing use_cache logging_nan_inf_filter load_best_model_at_end save_strategy
    ignore_data_skip seed full_determinism use_cpu remove_unused_columns label_names
    length_column_name ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers
    ddp_static_graph fsdp torch_compile torch_compile_backend torch_compile_mode""".split()
)
VERSION_DEPENDENT = frozenset({"activation_checkpointing", "activation_checkpointing_kwargs"})

_COMPILED = "It compiles around the clipping engine. Unset it, and set `torch_compile=True`."
_OWNS_STEP = "It owns the backward pass, the clipping and the step. Remove it."
_SPLIT = "A process would see only a part of each example's gradient. Use FSDP2 (`fsdp`)."
_SCALED_LOSS = "fp16 skips steps on overflow, which depends on the data. Use bf16=True."
_FSDP1 = "FSDP1 and XLA hide a layer's parameters from the clipping engine. Use version 2."
_CHECKPOINTING = options(
    "Gradients would be formed outside the clipping engine, or with other dropout masks than the "
    "loss. Remove these options.",
    use_reentrant=(False,),
    preserve_rng_state=(True,),
    selective=(False, None),  # of TRL, which would choose what is recomputed
)
REFUSED: Mapping[str, Refusal] = {
    "auto_find_batch_size": only(
        "It restarts training from changed weights. Set `auto_physical_batch_size=True`.", False
    ),
    "gradient_accumulation_steps": only(
        "A step is a whole logical batch. Set `expected_batch_size`.", 1
    ),
    "optim": replace(
        only('Others step before the noise. Use "adamw_torch" or "sgd".', *STEPPING_OPTIMIZERS),
        expected="to be an optimizer that steps after the backward pass",
    ),
    "label_smoothing_factor": only(
        "It averages over the batch, so neighbors share a loss. Remove it.", 0, None
    ),
    "neftune_noise_alpha": only("Its noise depends on the longest neighbor. Remove it.", None),
    "use_liger_kernel": only("Fused kernels hide layers from the engine. Remove it.", False),
    "fp16": only(_SCALED_LOSS, False),
    "activation_checkpointing_kwargs": _CHECKPOINTING,
    "gradient_checkpointing_kwargs": _CHECKPOINTING,
    "torch_empty_cache_steps": only(
        "It would be ignored. Lower `per_device_train_batch_size`.", None
    ),
    "include_num_input_tokens_seen": only(
        "It reveals the size of a draw. Remove it.", "no", False, None
    ),
    "report_to": Refusal(
        lambda value: _trackers(value) <= {*TRACKERS, "none"},  # type: ignore[arg-type]
        f"to be among {', '.join(TRACKERS)}, none",
        "Others may upload checkpoints, or measure the sizes of draws. Choose one of these.",
    ),
    "skip_memory_metrics": only("It reveals the size of a draw. Use `hf-dp bench memory`.", True),
    "debug": only("It prints activations of private examples. Remove it.", "", None, []),
    "save_on_each_node": only("One process keeps the ledger. Copy what rank 0 saved.", False),
    "enable_jit_checkpoint": only("A private run already saves on SIGTERM. Remove it.", False),
    "hub_strategy": only(
        "Others push the states in checkpoints. Use hub_strategy='end'.", "end", "every_save"
    ),
    "data_seed": only("Whoever knows it knows the draws. Use `insecure_seed`, in tests.", None),
    "accelerator_config": options(
        "Other values reshape the drawn batches, or are not checked here. Remove them.",
        split_batches=(False,),
        dispatch_batches=(None, False),
        even_batches=(True,),
        use_configured_state=(False,),
        gradient_accumulation_kwargs=(None, {}),
    ),
    "parallelism_config": only(_SPLIT, None),
    "dataloader_drop_last": only("The sampling would not be the accounted one. Remove it.", False),
    "dataloader_in_order": only("Small draws would overtake large ones. Remove it.", True, None),
    "train_sampling_strategy": only(
        "It is not the sampling that is accounted for. Remove it.", "random", None
    ),
    "fsdp_config": options(
        _FSDP1, version=(2,), fsdp_version=(2,), xla=(False, None), xla_fsdp_v2=(False, None)
    ),
    "deepspeed": only(_OWNS_STEP, None),
}

# What accelerate, launchers and trackers read from the environment, in lower case.
_OFF = ("false", "", "0", "no", "off", "n", "f")
_UPLOADS = only("It uploads states or the output folder, which the card does not list.", *_OFF)
ENVIRONMENT: Mapping[str, Refusal] = {
    "ACCELERATE_MIXED_PRECISION": only(_SCALED_LOSS, "no", "bf16", ""),
    "ACCELERATE_DYNAMO_BACKEND": only(_COMPILED, "no", ""),
    "ACCELERATE_USE_DEEPSPEED": only(_OWNS_STEP, *_OFF),
    "ACCELERATE_USE_FSDP": Refusal(
        lambda value: value in _OFF or os.environ.get("FSDP_VERSION") == "2",
        "to go with $FSDP_VERSION 2",
        _FSDP1,
    ),
    "ACCELERATE_USE_MEGATRON_LM": only(_OWNS_STEP, *_OFF),
    "ACCELERATE_USE_PARALLELISM_CONFIG": only(_SPLIT, *_OFF),
    **{name: _UPLOADS for names in TRACKERS.values() for name in names},
    "WANDB_WATCH": only("It would publish gradients. Unset it.", *_OFF, "parameters"),
    "WANDB_LOG_MODEL": only(_UPLOADS.why, *_OFF, "end"),
}
_UPLOADS_IF_UNSET = {"CLEARML_LOG_MODEL": "true"}  # the callback's own default


def settle_checkpointing(args: TrainingArguments) -> None:
    """Say in the options of checkpointing that it is not reentrant, unless they say what it is.
    transformers leaves it to torch as soon as there are options, and torch's default is True."""
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        value = getattr(args, name, None)
        if given := _as_dict(value):
            said = {"use_reentrant": False, **given}
            setattr(args, name, json.dumps(said) if isinstance(value, str) else said)


def unknown_fields(
    arguments_class: type[TrainingArguments] = TrainingArguments, known: Iterable[str] = ()
) -> list[Field[object]]:
    """Return the fields of this class that neither this module nor ``known`` names."""
    all_known = {*WORKS, *FREE, *REFUSED, *known}
    return [each for each in fields(arguments_class) if each.name not in all_known]


def inherited_problems(
    args: TrainingArguments,
    arguments_class: type[TrainingArguments] = TrainingArguments,
    known: Iterable[str] = (),
) -> Problems:
    """Return the problems of a private run with a class's fields that ``known`` does not name."""
    newer = "hf_dp does not know what this newer argument does. Remove it."
    new = {
        each.name: only(newer, default_of(each)) for each in unknown_fields(arguments_class, known)
    }
    found = Problems(args)
    for name, refusal in {**new, **REFUSED}.items():
        if name in arguments_class.__dataclass_fields__:
            refusal.note(name, found)
    return found


def environment_problems(report_to: str | Iterable[str] | None) -> Problems:
    """Return the problems with environment variables that are read, also by trackers in use."""
    read = {name for tracker in _trackers(report_to) for name in TRACKERS.get(tracker, ())}
    unread = {name for names in TRACKERS.values() for name in names} - read
    values = {
        f"${name}": value.strip().lower()
        for name, value in {**_UPLOADS_IF_UNSET, **os.environ}.items()
    }
    found = Problems(values)
    for name, refusal in ENVIRONMENT.items():
        if f"${name}" in values and name not in unread:
            refusal.note(f"${name}", found)
    return found


def tracker_problems(callbacks: Iterable[TrainerCallback]) -> Problems:
    """Return the problems with trackers that are callbacks, of whatever origin: those that a
    trainer was given are as if `report_to` named them."""
    given = list(callbacks)
    kinds = INTEGRATION_TO_CALLBACK.items()
    names = [name for name, kind in kinds if any(isinstance(each, kind) for each in given)]
    found = Problems({"callbacks": names})
    REFUSED["report_to"].note("callbacks", found)
    return found.join(environment_problems(names))
