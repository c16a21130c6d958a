"""The configuration of an infilling classifier: its base, and which words stand for the classes."""

from __future__ import annotations

import importlib
from dataclasses import field
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec


class InfillingConfig(PreTrainedConfig):
    """Configuration of :class:`~hf_dp.tasks.infilling.InfillingForSequenceClassification`."""

    model_type = "hf_dp_infilling"
    sub_configs_defaults = {"base_config": SubConfigSpec(AutoConfig, model_type="bert")}

    base_config: PreTrainedConfig | dict[str, object] | None = None  # of the masked language model
    label_word_ids: list[int] = field(default_factory=list)  # the token that stands for each class
    label_words: list[str] = field(default_factory=list)
    mask_token_id: int | None = None  # in whose place they are predicted
    template: str | None = None  # for the reader; the tokenizer applies it
    pad_token_id: int | None = None
    eos_token_id: int | None = None
    pretraining_sources: list[str] | None = None  # for the card, which lists them
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        # The Auto classes may be asked for the model of any configuration. Importing the model
        # together with this module would be too early: AutoConfig is among the first things that
        # transformers imports.
        importlib.import_module("hf_dp.tasks.infilling")


# hf_dp/__init__.py has this module imported as soon as transformers has an AutoConfig.
AutoConfig.register(InfillingConfig.model_type, InfillingConfig, exist_ok=True)
