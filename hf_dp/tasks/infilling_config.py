"""The configuration of an infilling classifier: its base, and which words stand for the classes."""

from __future__ import annotations

import importlib
from dataclasses import field
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec


class InfillingConfig(PreTrainedConfig):
    """Configuration of :class:`~hf_dp.tasks.infilling.InfillingForSequenceClassification`.

    Attributes:
        base_config: the configuration of the masked language model.
        label_word_ids: the token that stands for each class.
        label_words: the same as words.
        mask_token_id: the token in whose place they are predicted.
        template: for the reader; the tokenizer applies it.
        pretraining_sources: for the card, which lists them.
    """

    model_type = "hf_dp_infilling"
    sub_configs_defaults = {"base_config": SubConfigSpec(AutoConfig, model_type="bert")}

    base_config: PreTrainedConfig | dict[str, object] | None = None
    label_word_ids: list[int] = field(default_factory=list)
    label_words: list[str] = field(default_factory=list)
    mask_token_id: int | None = None
    template: str | None = None
    pad_token_id: int | None = None
    eos_token_id: int | None = None
    pretraining_sources: list[str] | None = None
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        # The Auto classes may be asked for the model of any configuration. Importing the model
        # together with this module would be too early: AutoConfig is among the first things that
        # transformers imports.
        importlib.import_module("hf_dp.tasks.infilling")


# hf_dp/__init__.py has this module imported as soon as transformers has an AutoConfig.
AutoConfig.register(InfillingConfig.model_type, InfillingConfig, exist_ok=True)
