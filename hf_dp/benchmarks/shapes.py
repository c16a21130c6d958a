"""The models that are measured: published sizes, random weights, built from a configuration.

Nothing is downloaded. Speed and memory of dense layers do not depend on the values of the weights.
Dropout is on as published (0.1); LoRA has none of its own, as is PEFT's default. Sizes: Radford et
al. 2019 (GPT-2), Liu et al. 2019 (RoBERTa), Wang et al. 2020 (MiniLM).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Shape:
    """One model.

    Attributes:
        build: ``build(dropout, tied)`` returns the model; its ``tied`` matters only where ``tied``
            below is True.
        length: default number of positions T.
        batch_size: default number of examples b, one that fits a laptop.
        vocabulary: token ids are below it.
        positions: the longest T that the model can embed.
        tied: whether output head and input embedding are one trainable parameter.
    """

    build: Callable[[float, bool], nn.Module]
    length: int
    batch_size: int
    vocabulary: int
    positions: int
    tied: bool = False


def _gpt2(
    layers: int, hidden: int, heads: int, vocabulary: int = 50257, positions: int = 1024
) -> Callable[..., Any]:
    def build(dropout: float, tied: bool) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            n_layer=layers,
            n_embd=hidden,
            n_head=heads,
            vocab_size=vocabulary,
            n_positions=positions,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            tie_word_embeddings=tied,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
        return GPT2LMHeadModel(config)

    return build


def _gpt2_lora(dropout: float, tied: bool) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["c_attn"], fan_in_fan_out=True)
    return get_peft_model(_gpt2(12, 768, 12)(dropout, tied), config)


def _llama(dropout: float, tied: bool) -> nn.Module:
    """Build a decoder of Llama's kind, which has no dropout but in attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        intermediate_size=2048,
        vocab_size=32000,
        max_position_embeddings=4096,
        attention_dropout=dropout,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _llama_lora(dropout: float, tied: bool) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", r=16, target_modules=["q_proj", "v_proj"])
    return get_peft_model(_llama(dropout, tied), config)


def _encoder(
    family: str, layers: int, hidden: int, heads: int, inner: int, **sizes: int
) -> Callable[..., Any]:
    def build(dropout: float, tied: bool) -> nn.Module:
        import transformers

        config = getattr(transformers, f"{family}Config")(
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            intermediate_size=inner,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            num_labels=2,
            **sizes,
        )
        return getattr(transformers, f"{family}ForSequenceClassification")(config)

    return build


def _infilling(
    family: str, layers: int, hidden: int, heads: int, inner: int, **sizes: int
) -> Callable[..., Any]:
    """Build the encoder of :func:`_encoder`, which classifies by a word of its vocabulary."""

    def build(dropout: float, tied: bool) -> nn.Module:
        import transformers

        from hf_dp.tasks.infilling import InfillingForSequenceClassification
        from hf_dp.tasks.infilling_config import InfillingConfig

        base = getattr(transformers, f"{family}Config")(
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            intermediate_size=inner,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            tie_word_embeddings=tied,
            **sizes,
        )
        words: dict[str, Any] = {
            "label_word_ids": [10, 11],
            "mask_token_id": 4,
            "attn_implementation": "sdpa",
        }
        return InfillingForSequenceClassification(InfillingConfig(base_config=base, **words))

    return build


_ROBERTA = {
    "vocab_size": 50265,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "pad_token_id": 1,
}
_BERT = {"vocab_size": 30522, "max_position_embeddings": 512}
_TINY = {"vocab_size": 64, "max_position_embeddings": 32}

SHAPES: Mapping[str, Shape] = {
    "gpt2": Shape(_gpt2(12, 768, 12), 100, 8, 50257, 1024, tied=True),
    "gpt2-medium": Shape(_gpt2(24, 1024, 16), 100, 4, 50257, 1024, tied=True),
    "gpt2-large": Shape(_gpt2(36, 1280, 20), 100, 2, 50257, 1024, tied=True),
    "gpt2-lora": Shape(_gpt2_lora, 100, 8, 50257, 1024),  # the tied weight is frozen
    "llama-small": Shape(_llama, 512, 4, 32000, 4096),
    "llama-small-lora": Shape(_llama_lora, 512, 4, 32000, 4096),
    "roberta-base": Shape(_encoder("Roberta", 12, 768, 12, 3072, **_ROBERTA), 128, 16, 50265, 512),
    "roberta-large": Shape(_encoder("Roberta", 24, 1024, 16, 4096, **_ROBERTA), 128, 8, 50265, 512),
    "roberta-base-infilling": Shape(
        _infilling("Roberta", 12, 768, 12, 3072, **_ROBERTA), 128, 16, 50265, 512, tied=True
    ),
    "minilm-infilling": Shape(
        _infilling("Bert", 6, 384, 12, 1536, **_BERT), 128, 16, 30522, 512, tied=True
    ),
    "minilm": Shape(_encoder("Bert", 6, 384, 12, 1536, **_BERT), 128, 16, 30522, 512),
    "tiny": Shape(_gpt2(2, 16, 2, 64, 32), 12, 4, 64, 32, tied=True),  # for tests
    "tiny-bert": Shape(_encoder("Bert", 2, 16, 2, 32, **_TINY), 12, 4, 64, 32),  # for tests
}
