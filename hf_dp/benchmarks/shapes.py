"""The models that are measured: published sizes, random weights, built from a configuration.

Nothing is downloaded. Speed and memory of dense layers do not depend on the values of the weights.
Dropout is on as published (0.1); LoRA has none of its own, as is PEFT's default. Sizes: Radford et
al. 2019 (GPT-2), Liu et al. 2019 (RoBERTa), Wang et al. 2020 (MiniLM).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Shape:
    """One model.

    Attributes:
        model: its class in transformers.
        sizes: of its configuration.
        positions: the most tokens of an example.
        dropouts: which fields of the configuration are probabilities of dropout.
        tied: whether output head and input embedding are one trainable parameter.
        lora: arguments of PEFT's ``LoraConfig``; none trains everything.
        infilling: whether a word of the vocabulary is the class, instead of a head.
    """

    model: str
    sizes: Mapping[str, int]
    positions: int
    dropouts: tuple[str, ...]
    tied: bool = False
    lora: Mapping[str, Any] = field(default_factory=dict)
    infilling: bool = False

    def build(self, dropout: float, tied: bool = True) -> nn.Module:
        """Return the model; ``tied=False`` gives a tied head a weight of its own."""
        import transformers

        cls = getattr(transformers, self.model)
        config = cls.config_class(
            **self.sizes,
            **dict.fromkeys(self.dropouts, dropout),
            tie_word_embeddings=tied and self.model != "LlamaForCausalLM",
            use_cache=False,
        )
        if self.infilling:
            from hf_dp.tasks.infilling import InfillingForSequenceClassification as Infilling
            from hf_dp.tasks.infilling_config import InfillingConfig

            words: dict[str, Any] = {"label_word_ids": [10, 11], "mask_token_id": 4}
            words |= {"attn_implementation": "sdpa"}
            return Infilling(InfillingConfig(base_config=config, **words))
        model: nn.Module = cls(config)
        if self.lora:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **self.lora))
        return model


def _gpt2(layers: int, hidden: int, heads: int, vocabulary: int = 50257, most: int = 1024) -> Shape:
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": most}
    sizes |= {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 0}
    dropouts = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    return Shape("GPT2LMHeadModel", sizes, most, dropouts, tied=True)


def _layers(layers: int, hidden: int, heads: int, inner: int, **more: int) -> dict[str, int]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return {**sizes, "intermediate_size": inner, **more}


def _encoder(family: str, positions: int, sizes: Mapping[str, int]) -> Shape:
    dropouts = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    sizes = {"max_position_embeddings": positions, **sizes}
    return Shape(f"{family}ForSequenceClassification", sizes, positions, dropouts)


# Two of RoBERTa's positions are for padding.
_ROBERTA = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
_ROBERTA |= {"pad_token_id": 1}
_GPT2 = _gpt2(12, 768, 12)
_LLAMA = Shape(
    "LlamaForCausalLM",
    _layers(12, 768, 12, 2048, vocab_size=32000, max_position_embeddings=4096),
    4096,
    ("attention_dropout",),
)
_BASE = _encoder("Roberta", 512, _layers(12, 768, 12, 3072, **_ROBERTA))
_MINILM = _encoder("Bert", 512, _layers(6, 384, 12, 1536, vocab_size=30522))

SHAPES: Mapping[str, Shape] = {
    "gpt2": _GPT2,
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-lora": replace(  # the tied weight is frozen
        _GPT2,
        tied=False,
        lora={"r": 8, "target_modules": ["c_attn"], "fan_in_fan_out": True},
    ),
    "llama-small": _LLAMA,
    "llama-small-lora": replace(_LLAMA, lora={"r": 16, "target_modules": ["q_proj", "v_proj"]}),
    "roberta-base": _BASE,
    "roberta-large": _encoder("Roberta", 512, _layers(24, 1024, 16, 4096, **_ROBERTA)),
    "roberta-base-infilling": replace(_BASE, infilling=True, tied=True),
    "minilm": _MINILM,
    "minilm-infilling": replace(_MINILM, infilling=True, tied=True),
    "tiny": _gpt2(2, 16, 2, 64, 32),  # for tests
    "tiny-bert": _encoder("Bert", 32, _layers(2, 16, 2, 32, vocab_size=64)),  # for tests
}
