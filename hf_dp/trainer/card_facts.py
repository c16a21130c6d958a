"""What a trainer knows for its card, and the lines with which a reader of it loads the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from hf_dp.cards.details import BASE_MODEL, REPOSITORY, CardDetails
from hf_dp.losses import base_model, known_task
from hf_dp.statement.record import FILE_NAME, read
from hf_dp.tasks.infilling_config import InfillingConfig
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.tuners.adapter import AdapterConfig

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
        trainer.evaluation_metrics(),
        {**_public_settings(args), **trainer.training.words()},
    )
    return known.with_given(**given)


def describe(trainer: Any, details: Mapping[str, object]) -> None:
    """Note what the user says of a trainer's card.

    Raises: InvalidArgumentError for what the Hub would refuse; nothing is taken over then.
    """
    details_of(trainer, {**trainer.card, **details})
    trainer.card.update(details)


def details_of_model(
    model: nn.Module,
    name: str,
    metrics: Mapping[str, float] = MappingProxyType({}),
    training: Mapping[str, object] = MappingProxyType({}),
) -> CardDetails:
    """Return what a card says of a model. Args: name: its folder or repository."""
    base = base_model(model)
    tag = _PIPELINES.get(known_task(base))
    return CardDetails(
        model_name=name.rstrip("/\\").replace("\\", "/").split("/")[-1],
        base_model=getattr(getattr(base, "config", None), "name_or_path", None) or None,
        task_tag=tag,
        library_name="peft" if hasattr(model, "peft_config") else "transformers",
        pretraining_sources=tuple(pretraining_sources(base)),
        usage=usage(model, tag),
        metrics=metrics,
        training=training,
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


def usage(model: nn.Module, task_tag: str | None) -> str | None:
    """Return Python lines that load a model from where the card is, or None where there is no
    pipeline for the task.

    :data:`~hf_dp.cards.details.REPOSITORY` and BASE_MODEL stand for the names.

    An infilling classifier is one of hf_dp's own classes, which transformers knows after
    ``import hf_dp``. To load its adapter, the base is first made a classifier again. So is the base
    of every adapter of a classifier: a pipeline would give it the classes that it had before.
    """
    config: Any = getattr(base_model(model), "config", None)
    adapters = getattr(model, "peft_config", {})
    ours = any(isinstance(each, AdapterConfig) for each in adapters.values())
    infills, kind = isinstance(config, InfillingConfig), type(base_model(model)).__name__
    classifies = kind.endswith("Classification")
    if infills and adapters:
        return _infilling_adapter(config, merges=not ours)
    if task_tag is None:
        return None
    first = "import hf_dp  # makes the adapter known\n" if ours else ""
    if task_tag == "question-answering":  # for which transformers has no pipeline
        return f"""{first}from transformers import AutoModelForQuestionAnswering, AutoTokenizer

model = AutoModelForQuestionAnswering.from_pretrained({REPOSITORY!r})
tokenizer = AutoTokenizer.from_pretrained({REPOSITORY!r})"""
    # transformers by itself loads only the adapters that PEFT knows
    if ours or (adapters and classifies):
        reader, reads = "tokenizer", "AutoTokenizer"
        if task_tag == "image-classification":
            reader, reads = "image_processor", "AutoImageProcessor"
        options = ""
        if classifies:
            options = f", id2label={config.id2label!r}, ignore_mismatched_sizes=True"
        return f"""{first}from peft import PeftModel
from transformers import {reads}, {kind}, pipeline

base = {kind}.from_pretrained({BASE_MODEL!r}{options})
model = PeftModel.from_pretrained(base, {REPOSITORY!r})
model = pipeline({task_tag!r}, model=model, {reader}={reads}.from_pretrained({REPOSITORY!r}))"""
    first = "import hf_dp  # makes the class known\n" if infills else ""
    return f"""{first}from transformers import pipeline

model = pipeline({task_tag!r}, model={REPOSITORY!r})"""


def _infilling_adapter(config: InfillingConfig, merges: bool) -> str:
    names = [label for _, label in sorted((config.id2label or {}).items())]
    words = dict(zip(names, config.label_words, strict=True))
    block = json.dumps({"template": config.template, "label_words": words})
    return f"""from peft import PeftModel
from transformers import AutoTokenizer, pipeline

from hf_dp.tasks.infilling import load_infilling
from hf_dp.tasks.templates import Infilling

infilling = Infilling.of({block})
tokenizer = AutoTokenizer.from_pretrained({BASE_MODEL!r})
base, tokenizer = load_infilling({BASE_MODEL!r}, tokenizer, infilling, {names!r})
model = PeftModel.from_pretrained(base, {REPOSITORY!r}){".merge_and_unload()" * merges}
model = pipeline("text-classification", model=model, tokenizer=tokenizer)"""
