"""What a trainer knows for its card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from hf_dp.cards.details import CardDetails
from hf_dp.losses import base_model, task_of
from hf_dp.statement.record import FILE_NAME, read
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.usage import usage

_PIPELINES = {
    "sequence_classification": "text-classification",
    "token_classification": "token-classification",
    "image_classification": "image-classification",
    "causal_lm": "text-generation",
    "masked_lm": "fill-mask",
    "question_answering": "question-answering",
}
# What `create_model_card` of transformers and TRL calls a field of CardDetails.
_OTHER_NAMES = {
    "finetuned_from": "base_model",
    "dataset_name": "dataset",
    "dataset_tags": "dataset",
    "tasks": "task_tag",
}


def details_of(trainer: Any, given: Mapping[str, object]) -> CardDetails:
    """Return what the card of a trainer says beside its statement.

    Args: given: what the user said, which takes precedence.

    Raises: InvalidArgumentError for what the Hub would refuse.
    """
    args = trainer.args
    known = details_of_model(
        trainer.model,
        args.hub_model_id or str(args.output_dir),
        metrics=trainer.evaluation_metrics(),
        training={**_public_settings(args), **trainer.training.words()},
    )
    return known.with_given(**given)


def describe(trainer: Any, details: Mapping[str, object]) -> None:
    """Note what the user says of a trainer's card.

    Raises: InvalidArgumentError for what the Hub would refuse; nothing is taken over then.
    """
    details_of(trainer, {**trainer.card, **details})
    trainer.card.update(details)


def details_of_model(model: nn.Module, name: str, **known: Any) -> CardDetails:
    """Return what a card says of a model. Args: name: its folder or repository. known: the rest."""
    base = base_model(model)
    tag = _PIPELINES.get(_task(base))
    return CardDetails(
        model_name=name.rstrip("/\\").replace("\\", "/").split("/")[-1],
        base_model=getattr(getattr(base, "config", None), "name_or_path", None) or None,
        task_tag=tag,
        library_name="peft" if hasattr(model, "peft_config") else "transformers",
        pretraining_sources=tuple(pretraining_sources(base)),
        usage=usage(model, tag),
        **known,
    )


def given_before(checkpoint: str) -> dict[str, object]:
    """Return what the user said of the card of a run, as one of its checkpoints has it."""
    kept = read(checkpoint).card if Path(checkpoint, FILE_NAME).exists() else None
    if kept is None:
        return {}
    details = CardDetails.from_dict(kept)
    return {name: getattr(details, name) for name in details.given}


def in_our_names(options: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments of a ``create_model_card`` by the names of CardDetails, without those
    that are None."""
    given = {name: value for name, value in options.items() if value is not None}
    return {_OTHER_NAMES.get(name, name): value for name, value in given.items()}


def pretraining_sources(model: nn.Module) -> list[str]:
    """List the public data sets that the base has seen, as far as its configuration names them."""
    return list(
        getattr(getattr(base_model(model), "config", None), "pretraining_sources", None) or []
    )


def _task(model: nn.Module) -> str:
    try:
        return task_of(model)
    except ValueError:  # a task of the user's own, with its own per-example loss
        return "other"


def _public_settings(args: DPTrainingArguments) -> dict[str, object]:
    names = [
        "learning_rate",
        "optim",
        "lr_scheduler_type",
        "warmup_steps",
        "weight_decay",
        "num_train_epochs",
        "per_device_train_batch_size",
        "seed",
    ]
    if args.max_tokens_per_physical_batch is not None:
        names.append("max_tokens_per_physical_batch")
    values = {name: getattr(args, name) for name in names}
    return {name: getattr(value, "value", value) for name, value in values.items()}
