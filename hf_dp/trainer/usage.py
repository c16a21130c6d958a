"""The lines with which a reader of the card loads the model."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from hf_dp.cards.details import BASE_MODEL, REPOSITORY
from hf_dp.losses import base_model
from hf_dp.tasks.infilling_config import InfillingConfig
from hf_dp.tuners.adapter import AdapterConfig


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
