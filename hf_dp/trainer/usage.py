"""The lines with which a reader of the card loads the model."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from hf_dp.cards.details import BASE_MODEL, REPOSITORY
from hf_dp.losses import base_model
from hf_dp.tasks.infilling_config import InfillingConfig
from hf_dp.tuners.adapter import AdapterConfig

_IMAGES = "image-classification"
_SPANS = "question-answering"  # for which transformers has no pipeline
_CLASSIFIER = "Classification"  # the end of its class's name


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
    if isinstance(config, InfillingConfig) and adapters:
        return _adapter(config, REPOSITORY, BASE_MODEL, merges=not ours)
    if task_tag is None:
        return None
    class_name = type(base_model(model)).__name__
    if task_tag == _SPANS:
        return "\n".join(
            [
                *["import hf_dp  # makes the adapter known"] * ours,
                "from transformers import AutoModelForQuestionAnswering, AutoTokenizer",
                "",
                f"model = AutoModelForQuestionAnswering.from_pretrained({REPOSITORY!r})",
                f"tokenizer = AutoTokenizer.from_pretrained({REPOSITORY!r})",
            ]
        )
    # transformers by itself loads only the adapters that PEFT knows
    if ours or (adapters and class_name.endswith(_CLASSIFIER)):
        return _on_its_base(config, class_name, task_tag, ours)
    lines = ["import hf_dp  # makes the class known"] if isinstance(config, InfillingConfig) else []
    return "\n".join(
        [
            *lines,
            "from transformers import pipeline",
            "",
            f"model = pipeline({task_tag!r}, model={REPOSITORY!r})",
        ]
    )


def _on_its_base(config: Any, class_name: str, task_tag: str, ours: bool) -> str:
    reader, reads = "tokenizer", "AutoTokenizer"
    options = ""
    if class_name.endswith(_CLASSIFIER):
        options = f", id2label={config.id2label!r}, ignore_mismatched_sizes=True"
    if task_tag == _IMAGES:
        reader, reads = "image_processor", "AutoImageProcessor"
    return "\n".join(
        [
            *["import hf_dp  # makes the adapter known"] * ours,
            "from peft import PeftModel",
            f"from transformers import {reads}, {class_name}, pipeline",
            "",
            f"base = {class_name}.from_pretrained({BASE_MODEL!r}{options})",
            f"model = PeftModel.from_pretrained(base, {REPOSITORY!r})",
            f"model = pipeline({task_tag!r}, model=model, "
            f"{reader}={reads}.from_pretrained({REPOSITORY!r}))",
        ]
    )


def _adapter(config: InfillingConfig, name: str, base_name: str, merges: bool) -> str:
    names = [label for _, label in sorted((config.id2label or {}).items())]
    block = {
        "template": config.template,
        "label_words": dict(zip(names, config.label_words, strict=True)),
    }
    return "\n".join(
        [
            "from peft import PeftModel",
            "from transformers import AutoTokenizer, pipeline",
            "",
            "from hf_dp.tasks.infilling import load_infilling",
            "from hf_dp.tasks.templates import Infilling",
            "",
            f"infilling = Infilling.of({json.dumps(block)})",
            f"tokenizer = AutoTokenizer.from_pretrained({base_name!r})",
            f"base, tokenizer = load_infilling({base_name!r}, tokenizer, infilling, {names!r})",
            "model = PeftModel.from_pretrained(base, "
            f"{name!r}){'.merge_and_unload()' if merges else ''}",
            'model = pipeline("text-classification", model=model, tokenizer=tokenizer)',
        ]
    )
