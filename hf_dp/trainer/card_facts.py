"""What the card says beyond the privacy statement: names, settings and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from hf_dp.cards.escaping import public_name
from hf_dp.losses import base_model, task_of
from hf_dp.statement.record import FILE_NAME, read
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.usage import usage

_PIPELINES = {"sequence_classification": "text-classification", "causal_lm": "text-generation"}


def card_details(trainer: Any, **given: Any) -> dict[str, Any]:
    """Return the keyword arguments of :func:`render_card` for a trainer.

    What the user passed to ``create_model_card`` takes precedence.
    """
    args, model = trainer.args, base_model(trainer.model)
    name = args.hub_model_id or args.output_dir
    dataset = given.pop("dataset", None) or given.pop("dataset_name", None)
    tags = given.pop("tags", None) or []
    short = args.hub_model_id or str(name).rstrip("/\\").replace("\\", "/").split("/")[-1]
    known = {
        "usage": usage(
            trainer.model, short, public_name(trainer.base_model_name), _PIPELINES.get(_task(model))
        ),
        "model_name": given.pop("model_name", None) or short.split("/")[-1],
        "base_model": given.pop("finetuned_from", None)
        or trainer.base_model_name
        or getattr(getattr(model, "config", None), "_name_or_path", None)
        or None,
        "dataset": dataset[0]
        if isinstance(dataset, (list, tuple)) and dataset
        else dataset or trainer.dataset_name,
        "task_tag": _PIPELINES.get(_task(model)),
        "metrics": trainer.evaluation_metrics(),
        "library_name": "peft" if hasattr(trainer.model, "peft_config") else "transformers",
        "training": _public_settings(args),
        "license": given.pop("license", None),
        "language": given.pop("language", None),
        "pretraining_sources": pretraining_sources(model),
        "tags": [tags] if isinstance(tags, str) else list(tags),
    }
    given.pop("tasks", None)
    given.pop("dataset_tags", None)
    given.pop("dataset_args", None)
    if given:
        raise TypeError(f"create_model_card() got unexpected arguments {sorted(given)}")
    return known


def pretraining_sources(model: nn.Module) -> list[str]:
    """List the public data sets that the base has seen, as far as its configuration names them."""
    return list(
        getattr(getattr(base_model(model), "config", None), "pretraining_sources", None) or []
    )


def earlier_run(model: nn.Module) -> str | None:
    """Describe the private run that made the base, by the privacy.json in its folder.

    Return None for other bases.
    """
    folder = getattr(getattr(base_model(model), "config", None), "_name_or_path", None)
    if not folder or not Path(folder, FILE_NAME).exists():
        return None
    record = read(folder)
    spent = None if record.statement is None else record.statement["epsilon"]
    return f"status {record.status!r}, epsilon {spent}, {record.ledger.steps():,} releases"


def _task(model: nn.Module) -> str:
    try:
        return task_of(model)
    except ValueError:  # a task of the user's own, with its own per-example loss
        return "other"


def _public_settings(args: DPTrainingArguments) -> dict[str, Any]:
    names = (
        "learning_rate",
        "optim",
        "lr_scheduler_type",
        "warmup_steps",
        "weight_decay",
        "num_train_epochs",
        "max_steps",
    )
    sizes = ["per_device_train_batch_size"]
    if args.max_tokens_per_physical_batch is not None:
        sizes.append("max_tokens_per_physical_batch")
    values = {name: getattr(args, name) for name in (*names, *sizes, "expected_batch_size", "seed")}
    return {name: getattr(value, "value", value) for name, value in values.items()}
