"""The model zoo of the clipping tests: tiny random models of many architectures, their examples,
and a loop over them.

Examples are made one by one, unpadded; :func:`collate` pads them into the batch that the engine
sees. The oracle never sees a batch, a padding token or an attention mask, uses plain autograd in
float64, and shares no code with hf_dp.

    architecture, model, examples = built("bert", (5, 1, 3))
    assert_exact(architecture, model, examples)
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import models
import torch
import transformers as hf
from models import (
    DECODER,
    ENCODER,
    LABELS,
    POSITIONS,
    VOCABULARY,
    Batch,
    Expected,
    Loss,
    assert_same_sums,
    base_of,
    builder,
    clip,
    is_language_model,
    loop,
)
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dp.clipping import ClippingEngine
from hf_dp.losses import per_example_loss
from hf_dp.tasks.infilling import InfillingForSequenceClassification
from hf_dp.tasks.infilling_config import InfillingConfig

EXACT = 1e-9  # float64: some hundred roundings of 1e-16, in another order
MASK = 3
POISON = 60  # a token that only the poisoned example has
IGNORED = -100


# -- one architecture ---


@dataclass(frozen=True)
class Architecture:
    """A builder and the task its examples are made for.

    ``build(dropout, dtype, **config)``; ``task``: classification, causal_lm, masked_lm, infilling,
    seq2seq or image; ``float32_inside``: transformers casts to float32 within (see
    :func:`without_downcasts`); ``end``: the last token of each example, where the model looks for
    one.
    """

    build: Callable[..., Any]
    task: str
    float32_inside: bool = False
    end: int | None = None

    def examples(self, model: Any, lengths: Sequence[int], seed: int = 0) -> list[Batch]:
        """One batch of one for each length, unpadded; for images the lengths only count."""
        generator = torch.Generator().manual_seed(seed)
        return [_EXAMPLES[self.task](self, model, length, generator) for length in lengths]

    def precision(self) -> AbstractContextManager[None]:
        return without_downcasts() if self.float32_inside else nullcontext()


def built(
    name: str, lengths: Sequence[int], **options: Any
) -> tuple[Architecture, Any, list[Batch]]:
    """An architecture, its model, and examples of these lengths."""
    architecture = ARCHITECTURES[name]
    model = architecture.build(**options)
    return architecture, model, architecture.examples(model, lengths)


def _tokens(count: int, generator: torch.Generator) -> Tensor:
    tokens = torch.randint(4, VOCABULARY, (1, count), generator=generator)
    tokens[:, ::3] = 7  # equal tokens in one example: their rows must be added before squaring
    return tokens


def _label(generator: torch.Generator) -> Tensor:
    return torch.randint(0, LABELS, (1,), generator=generator)


def _classification(a: Architecture, model: Any, length: int, generator: torch.Generator) -> Batch:
    tokens = _tokens(length, generator)
    if a.end is not None:
        tokens[:, -1] = a.end
    return {"input_ids": tokens, "labels": _label(generator)}


def _causal_lm(a: Architecture, model: Any, length: int, generator: torch.Generator) -> Batch:
    tokens = _tokens(length, generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _masked_lm(a: Architecture, model: Any, length: int, generator: torch.Generator) -> Batch:
    tokens = _tokens(length, generator)
    chosen = torch.arange(length)[None] % 2 == 0
    return {
        "input_ids": tokens.masked_fill(chosen, MASK),
        "labels": tokens.masked_fill(~chosen, IGNORED),
    }


def _infilling(a: Architecture, model: Any, length: int, generator: torch.Generator) -> Batch:
    """The mask in the middle; where the text is long enough, label words stand in it (7, by
    :func:`_tokens`)."""
    tokens = _tokens(length, generator)
    tokens[:, length // 2] = MASK
    return {"input_ids": tokens, "labels": _label(generator)}


def _seq2seq(a: Architecture, model: Any, length: int, generator: torch.Generator) -> Batch:
    labels = _tokens(1 + length // 2, generator)
    start = torch.full((1, 1), model.config.decoder_start_token_id)
    return {
        "input_ids": _tokens(length, generator),
        "decoder_input_ids": torch.cat([start, labels[:, :-1]], 1),
        "labels": labels,
    }


def _image(a: Architecture, model: Any, length: int, generator: torch.Generator) -> Batch:
    size = model.config.image_size
    pixels = torch.randn(1, 3, size, size, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels.to(next(model.parameters()).dtype), "labels": _label(generator)}


_EXAMPLES: dict[str, Callable[..., Batch]] = {
    "classification": _classification, "causal_lm": _causal_lm, "masked_lm": _masked_lm,
    "infilling": _infilling, "seq2seq": _seq2seq, "image": _image,
}  # fmt: skip


def logits(architecture: Architecture, model: Any, batch: Batch) -> Tensor:
    """What a model says of a batch, without its labels."""
    with architecture.precision(), torch.no_grad():
        return model(**{name: value for name, value in batch.items() if name != "labels"}).logits


def collate(model: Any, examples: Sequence[Batch]) -> Batch:
    """The examples as one right-padded batch, with an attention mask where there are tokens."""
    model = base_of(model)
    pad = getattr(model.config, "pad_token_id", None) or 0
    fill = {"input_ids": pad, "decoder_input_ids": pad, "labels": IGNORED}
    batch = {name: _padded([e[name] for e in examples], fill.get(name, 0)) for name in examples[0]}
    if "input_ids" in batch:
        batch["attention_mask"] = _padded([torch.ones_like(e["input_ids"]) for e in examples], 0)
    return batch


def _padded(tensors: Sequence[Tensor], value: int) -> Tensor:
    if tensors[0].dim() != 2:
        return torch.cat(list(tensors))
    longest = max(t.shape[1] for t in tensors)
    return torch.cat([F.pad(t, (0, longest - t.shape[1]), value=value) for t in tensors])


# -- losses: for the batch as a user writes them, for one example as the model has them ---


def together(model: nn.Module, batch: Batch) -> Tensor:
    """Per-example losses (b,) of a padded batch: hf_dp's own where it knows the task, else written
    out."""
    if "pixel_values" in batch:
        return F.cross_entropy(
            model(pixel_values=batch["pixel_values"]).logits, batch["labels"], reduction="none"
        )
    if batch["labels"].dim() == 1 or is_language_model(base_of(model)):
        return per_example_loss(model, batch)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return token_mean(model(**inputs).logits, batch["labels"])


def token_mean(logits: Tensor, labels: Tensor) -> Tensor:
    """(b,) means over each example's own labeled positions."""
    tokens = F.cross_entropy(logits.mT, labels, reduction="none", ignore_index=IGNORED)
    return tokens.sum(1) / (labels != IGNORED).sum(1)


# -- the oracle ---


def loop_over_losses(
    model: nn.Module, losses: Tensor, clipping_norm: float | None = None
) -> Expected:
    """The same from one forward of the whole batch: for dropout, whose masks belong to that
    forward."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parameters = list(trainable.values())
    found = [
        torch.autograd.grad(each, parameters, retain_graph=True, allow_unused=True)
        for each in losses
    ]
    return clip(trainable, found, clipping_norm)


# -- the engine, and both compared ---


def clipped(
    model: nn.Module,
    batch: Any,
    clipping_norm: float,
    strategy: str = "book_keeping",
    loss: Loss = together,
    seed: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Norms and clipped sums of one batch by the engine; ``seed`` fixes the dropout masks."""
    with ClippingEngine(model, clipping_norm, clipping="flat", strategy=strategy) as engine:
        if seed is not None:
            torch.manual_seed(seed)
        norms = engine.backward(loss(model, batch))
        return norms, engine.collect()


def assert_equal(
    norms: Tensor, sums: dict[str, Tensor], expected: Expected, tolerance: float = EXACT
) -> None:
    scale = float(expected.norms.max())
    torch.testing.assert_close(
        norms.double(), expected.norms, rtol=tolerance, atol=1e-6 * tolerance * scale
    )
    assert_same_sums(sums, expected.sums, atol=tolerance * expected.clipping_norm)


def assert_exact(
    architecture: Architecture, model: nn.Module, examples: Sequence[Batch], *strategies: str
) -> None:
    """Engine on the padded batch equals the loop over single, unpadded examples, by each strategy
    (by default book-keeping)."""
    with architecture.precision():
        expected = loop(model, examples)
        for strategy in strategies or ("book_keeping",):
            norms, sums = clipped(model, collate(model, examples), expected.clipping_norm, strategy)
            assert_equal(norms, sums, expected)


@contextmanager
def without_downcasts() -> Iterator[None]:
    """Casts of float64 tensors to float32 do nothing. transformers computes RMS norms and rotary
    embeddings in float32 also in a float64 model: a rounding of 1e-7, which depends on the order of
    operations and hides any error of that size. Engine and oracle both run without it."""
    to, softmax = torch.Tensor.to, F.softmax

    def kept(value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if value.dtype == torch.float64:
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            kwargs = {
                name: torch.float64 if each is torch.float32 else each
                for name, each in kwargs.items()
            }
        return to(value, *args, **kwargs)

    def in_own_dtype(
        value: Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Tensor:
        return softmax(
            value, *args, dtype=None if value.dtype == torch.float64 else dtype, **kwargs
        )

    with (
        patch.object(torch.Tensor, "to", kept),
        patch.object(torch.Tensor, "float", lambda value: kept(value, torch.float32)),
        patch.object(F, "softmax", in_own_dtype),
    ):
        yield


# -- an example that is not finite ---


def poison(model: nn.Module, examples: list[Batch], position: int, value: float) -> None:
    """One example's pixel, or what one of its tokens is looked up as: forward and what flows back
    into the table."""
    if "pixel_values" in examples[position]:
        examples[position]["pixel_values"][0, 0, 0, 0] = value
        return
    for example in examples:
        example["input_ids"][example["input_ids"] == POISON] = POISON - 1
    examples[position]["input_ids"][0, 0] = POISON

    def spoil(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output * torch.where(args[0] == POISON, value, 1.0)[..., None]

    names = ("word_embeddings", "embed_tokens", "wte")
    tables = [module for name, module in model.named_modules() if name.endswith(names)]
    assert tables
    for table in tables:
        table.register_forward_hook(spoil)


# -- builders ---


_GEMMA = DECODER | {
    "head_dim": 8,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
_BART = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "scale_embedding": True,
    "max_position_embeddings": POSITIONS,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "decoder_start_token_id": 0,
}  # fmt: skip
_OPT = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24,
    "max_position_embeddings": POSITIONS, "word_embed_proj_dim": 8, "pad_token_id": 1, "bos_token_id": 2,
    "eos_token_id": 3,
}  # fmt: skip
_VIT = {
    "image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "mlp_ratio": 2, "num_labels": LABELS,
}  # fmt: skip
_CONVNEXT = {
    "image_size": 8,
    "patch_size": 2,
    "hidden_sizes": [8, 12],
    "depths": [1, 1],
    "num_stages": 2,
}

mixtral = builder(
    hf.MixtralForCausalLM, hf.MixtralConfig, **DECODER, num_local_experts=4, num_experts_per_tok=2
)
qwen3_moe = builder(
    hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig, **DECODER, head_dim=8, num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=8,
)  # fmt: skip
deberta_v2 = builder(
    hf.DebertaV2ForSequenceClassification, hf.DebertaV2Config, **ENCODER, pos_att_type=["c2p", "p2c"],
    # left to itself the model casts its logits to float32
    problem_type="single_label_classification",
)  # fmt: skip


def _classifier(model_class: Any, config_class: Any, **fixed: Any) -> Architecture:
    return Architecture(builder(model_class, config_class, **ENCODER | fixed), "classification")


def _infilling_classifier(model_class: Any, config_class: Any, **fixed: Any) -> Architecture:
    build = builder(model_class, config_class, **ENCODER | fixed)

    def classifier(**options: Any) -> Any:
        masked_lm = build(**options)
        config = InfillingConfig(
            base_config=masked_lm.config, label_word_ids=[7, 9, 11], mask_token_id=MASK, num_labels=LABELS,
            attn_implementation=masked_lm.config._attn_implementation, pad_token_id=masked_lm.config.pad_token_id,
        )  # fmt: skip
        return InfillingForSequenceClassification(config, masked_lm).train()

    return Architecture(classifier, "infilling")


def _language_model(model_class: Any, config_class: Any, **fixed: Any) -> Architecture:
    return Architecture(
        builder(model_class, config_class, **fixed), "causal_lm", float32_inside=True
    )


ARCHITECTURES: dict[str, Architecture] = {
    "bert": Architecture(models.bert, "classification"),
    "distilbert": Architecture(models.distilbert, "classification"),
    "roberta": Architecture(models.roberta, "classification"),
    "albert": Architecture(models.albert, "classification"),
    "deberta_v2": Architecture(lambda **o: deberta_v2(relative_attention=False, type_vocab_size=2, **o), "classification"),
    "electra": _classifier(hf.ElectraForSequenceClassification, hf.ElectraConfig, embedding_size=8),
    "modernbert": Architecture(
        builder(
            hf.ModernBertForSequenceClassification, hf.ModernBertConfig, **ENCODER, classifier_pooling="mean",
            pad_token_id=0, cls_token_id=2, bos_token_id=2, sep_token_id=3, eos_token_id=3, local_attention=4,
            global_attn_every_n_layers=2,
        ),
        "classification",
        float32_inside=True,
    ),  # fmt: skip
    "mpnet": _classifier(hf.MPNetForSequenceClassification, hf.MPNetConfig),
    "bert_masked_lm": Architecture(models.bert_masked_lm, "masked_lm"),
    "roberta_masked_lm": Architecture(builder(hf.RobertaForMaskedLM, hf.RobertaConfig, **ENCODER, pad_token_id=1), "masked_lm"),
    "infilling_bert": _infilling_classifier(hf.BertForMaskedLM, hf.BertConfig),
    "gpt2_classifier": Architecture(models.gpt2_classifier, "classification"),
    "gpt2_tied": Architecture(models.gpt2, "causal_lm"),
    "gpt2_untied": Architecture(models.gpt2_untied, "causal_lm"),
    "opt": Architecture(builder(hf.OPTForCausalLM, hf.OPTConfig, **_OPT), "causal_lm"),
    "llama": _language_model(hf.LlamaForCausalLM, hf.LlamaConfig, **DECODER, attention_bias=True),
    "mistral": _language_model(hf.MistralForCausalLM, hf.MistralConfig, **DECODER, sliding_window=4),
    "qwen2": _language_model(hf.Qwen2ForCausalLM, hf.Qwen2Config, **DECODER),
    "qwen3_tied": _language_model(hf.Qwen3ForCausalLM, hf.Qwen3Config, **DECODER, head_dim=8, tie_word_embeddings=True),
    "gemma2": _language_model(hf.Gemma2ForCausalLM, hf.Gemma2Config, **_GEMMA),
    "gemma3": _language_model(hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, **_GEMMA),
    "gemma3_untied": _language_model(hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, **_GEMMA, tie_word_embeddings=False),
    "phi3": _language_model(hf.Phi3ForCausalLM, hf.Phi3Config, **DECODER),
    "gpt_neox": _language_model(
        hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, **{k: v for k, v in DECODER.items() if k != "num_key_value_heads"}
    ),
    "t5": Architecture(builder(hf.T5ForConditionalGeneration, hf.T5Config, **_T5), "seq2seq", float32_inside=True),
    "bart_classifier": Architecture(
        builder(hf.BartForSequenceClassification, hf.BartConfig, **_BART, num_labels=LABELS), "classification", end=2
    ),
    "bart": Architecture(builder(hf.BartForConditionalGeneration, hf.BartConfig, **_BART), "seq2seq"),
    "vit": Architecture(builder(hf.ViTForImageClassification, hf.ViTConfig, **_VIT), "image"),
    "dinov2": Architecture(builder(hf.Dinov2ForImageClassification, hf.Dinov2Config, **_VIT), "image"),
    "convnext": Architecture(builder(hf.ConvNextForImageClassification, hf.ConvNextConfig, **_CONVNEXT, num_labels=LABELS), "image"),
}  # fmt: skip

# More bases for infilling; tests/tasks/test_infilling.py runs them.
INFILLING: dict[str, Architecture] = {
    "bert": ARCHITECTURES["infilling_bert"],
    "bert untied": _infilling_classifier(hf.BertForMaskedLM, hf.BertConfig, tie_word_embeddings=False),
    "roberta": _infilling_classifier(hf.RobertaForMaskedLM, hf.RobertaConfig, pad_token_id=1),
    "distilbert": _infilling_classifier(hf.DistilBertForMaskedLM, hf.DistilBertConfig, n_layers=2, n_heads=2, dim=16),
    "albert": _infilling_classifier(hf.AlbertForMaskedLM, hf.AlbertConfig, embedding_size=8),
    "deberta_v2": _infilling_classifier(hf.DebertaV2ForMaskedLM, hf.DebertaV2Config, relative_attention=False, type_vocab_size=2),
    "electra": _infilling_classifier(hf.ElectraForMaskedLM, hf.ElectraConfig, embedding_size=8),
    "mpnet": _infilling_classifier(hf.MPNetForMaskedLM, hf.MPNetConfig),
    "modernbert": dataclasses.replace(
        _infilling_classifier(
            hf.ModernBertForMaskedLM, hf.ModernBertConfig, pad_token_id=0, cls_token_id=2, bos_token_id=2, sep_token_id=3,
            eos_token_id=3, local_attention=4, global_attn_every_n_layers=2,
        ),
        float32_inside=True,
    ),
}  # fmt: skip
