"""Tiny random models of many architectures, their examples and batches, and the oracle: a loop over
single examples.

The oracle shares no code with hf_dp. It takes one example at a time, unpadded, the model's *own*
loss, and plain autograd, in float64. It is exact because in a batch of one a batch mean is the
example's loss.

    architecture, model, examples = built("bert", (5, 1, 3))
    assert_exact(architecture, model, examples)
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dp.clipping import ClippingEngine
from hf_dp.clipping.gradients import PerExampleGradient
from hf_dp.clipping.norms import ExampleNorms
from hf_dp.errors import UnsupportedModelError
from hf_dp.losses import per_example_loss
from hf_dp.tasks.classification import labels_of
from hf_dp.tasks.infilling import LabelWords, with_label_words

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Any], Tensor]

VOCABULARY = 61
POSITIONS = 40
LABELS = 3
MASK = 3
POISON = 60  # a token that only the poisoned example has
IGNORED = -100
SHORT = (5, 1, 3, 4)  # every weight gradient of the tiny models is kept as outer products
LONG = (19, 1, 8, 19)  # most are formed at once: d x d < T (d + d)
EXACT = 1e-9  # float64: some hundred roundings of 1e-16, in another order

# Tests that take a device run on the CPU, and with `pytest -m gpu` on a GPU.
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]),
]  # fmt: skip


def on(device: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """These tensors on this device."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


# -- builders ---


def _ready(model: nn.Module, dtype: torch.dtype) -> Any:
    """Away from the symmetric initialisation: biases and norms get random values, so no gradient
    vanishes by chance."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype).train()


def builder(model_class: Any, config_class: Any, **fixed: Any) -> Callable[..., Any]:
    """``build(dropout, dtype, **config)`` of this class; without dropout and in float64 by
    default."""

    def build(dropout: float = 0.0, dtype: torch.dtype = torch.float64, **overrides: Any) -> Any:
        torch.manual_seed(0)
        config = config_class(**fixed | overrides)
        for name in vars(config):
            if name.endswith(("dropout", "dropout_prob", "dropout_rate", "_pdrop")):
                setattr(config, name, dropout)
        return _ready(model_class(config), dtype)

    return build


ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": POSITIONS, "num_labels": LABELS,
}  # fmt: skip
DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 24, "max_position_embeddings": POSITIONS, "bos_token_id": 2,
    "eos_token_id": 3, "pad_token_id": 0,
}  # fmt: skip
_DISTILBERT = {
    "vocab_size": VOCABULARY, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24,
    "max_position_embeddings": POSITIONS, "num_labels": LABELS,
}  # fmt: skip
_GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": 24, "n_positions": POSITIONS,
    "bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0,
}  # fmt: skip

_GEMMA = DECODER | {
    "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
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
    "image_size": 8, "patch_size": 2, "hidden_sizes": [8, 12], "depths": [1, 1], "num_stages": 2,
}  # fmt: skip
_BIT = {
    "image_size": 8, "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_groups": 2,
}  # fmt: skip

bert = builder(hf.BertForSequenceClassification, hf.BertConfig, **ENCODER)
# Tied decoder weight *and* bias: the bias belongs to two modules, one of them without a rule.
bert_masked_lm = builder(hf.BertForMaskedLM, hf.BertConfig, **ENCODER)
roberta = builder(hf.RobertaForSequenceClassification, hf.RobertaConfig, **ENCODER, pad_token_id=1)
distilbert = builder(hf.DistilBertForSequenceClassification, hf.DistilBertConfig, **_DISTILBERT)
# One layer used three times.
albert = builder(
    hf.AlbertForSequenceClassification,
    hf.AlbertConfig,
    **ENCODER | {"num_hidden_layers": 3},
    embedding_size=8,
)
gpt2 = builder(hf.GPT2LMHeadModel, hf.GPT2Config, **_GPT2)
gpt2_untied = builder(hf.GPT2LMHeadModel, hf.GPT2Config, **_GPT2, tie_word_embeddings=False)
gpt2_classifier = builder(
    hf.GPT2ForSequenceClassification, hf.GPT2Config, **_GPT2, num_labels=LABELS
)
llama = builder(hf.LlamaForCausalLM, hf.LlamaConfig, **DECODER, attention_bias=True)

# float64, which the default, grouped_mm, does not know
_MOE = DECODER | {"experts_implementation": "eager", "num_experts_per_tok": 2}
mixtral = builder(hf.MixtralForCausalLM, hf.MixtralConfig, **_MOE, num_local_experts=4)
qwen3_moe = builder(
    hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig, **_MOE, head_dim=8, num_experts=4, moe_intermediate_size=8
)  # fmt: skip
olmoe = builder(hf.OlmoeForCausalLM, hf.OlmoeConfig, **_MOE, num_experts=8)
deberta_v2 = builder(
    hf.DebertaV2ForSequenceClassification, hf.DebertaV2Config, **ENCODER, pos_att_type=["c2p", "p2c"],
    # left to itself the model casts its logits to float32
    problem_type="single_label_classification",
)  # fmt: skip


# -- architectures ---


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
        return [self._example(model, length, generator) for length in lengths]

    def _example(self, model: Any, length: int, generator: torch.Generator) -> Batch:
        tokens = _tokens(length, generator)
        label = torch.randint(0, LABELS, (1,), generator=generator)
        match self.task:
            case "classification":
                if self.end is not None:
                    tokens[:, -1] = self.end
                return {"input_ids": tokens, "labels": label}
            case "causal_lm":
                return {"input_ids": tokens, "labels": tokens.clone()}
            case "masked_lm":
                chosen = torch.arange(length)[None] % 2 == 0
                labels = tokens.masked_fill(~chosen, IGNORED)
                return {"input_ids": tokens.masked_fill(chosen, MASK), "labels": labels}
            case "choice":  # of three, the first of which is shorter
                tokens = torch.stack([_tokens(length, generator) for _ in range(LABELS)], 1)
                tokens[..., 0], mask = torch.arange(8, 8 + LABELS), torch.ones_like(tokens)
                mask[:, 0, 1:] = 0
                return {"input_ids": tokens, "attention_mask": mask, "labels": label}
            case "infilling":  # where the text is long, label words stand beside the mask
                masked = model.label_words.mask_token_id is not None
                tokens[:, length // 2 if masked else -1] = MASK if masked else LAST_WORD
                return {"input_ids": tokens, "labels": label}
            case "seq2seq":
                start = torch.full((1, 1), model.config.decoder_start_token_id)
                answer = _tokens(1 + length // 2, generator)
                begun = torch.cat([start, answer[:, :-1]], 1)
                return {"input_ids": tokens, "decoder_input_ids": begun, "labels": answer}
            case _:
                size = model.config.image_size
                pixels = torch.randn(1, 3, size, size, generator=generator, dtype=torch.float64)
                return {"pixel_values": pixels.to(next(model.parameters()).dtype), "labels": label}

    def precision(self) -> AbstractContextManager[None]:
        return without_downcasts() if self.float32_inside else nullcontext()


def _classifier(model_class: Any, config_class: Any, **fixed: Any) -> Architecture:
    return Architecture(builder(model_class, config_class, **ENCODER | fixed), "classification")


ONE_TOKEN, SEVERAL = [[7], [9], [11]], [[7], [9, 7], [9, 11, 7]]  # label words
LAST_WORD = 8  # of a decoder's template


def _by_words(base: Architecture, words: list[list[int]], mask: int | None) -> Architecture:
    """The classifier, by these label words, of a language model."""

    def classifier(**options: Any) -> Any:
        model = base.build(**options)
        model.config.update(labels_of(["a", "b", "c"]))
        last = [] if mask is not None else [LAST_WORD]
        return with_label_words(model, LabelWords("<S1> x", list("abc"), words, mask, last)).train()

    return Architecture(classifier, "infilling", base.float32_inside)


def _infilling_classifier(model_class: Any, config_class: Any, **fixed: Any) -> Architecture:
    base = Architecture(builder(model_class, config_class, **ENCODER | fixed), "masked_lm")
    return _by_words(base, ONE_TOKEN, MASK)


def _language_model(model_class: Any, config_class: Any, **fixed: Any) -> Architecture:
    build = builder(model_class, config_class, **fixed)
    return Architecture(build, "causal_lm", float32_inside=True)


ARCHITECTURES: dict[str, Architecture] = {
    "bert": Architecture(bert, "classification"),
    "distilbert": Architecture(distilbert, "classification"),
    "roberta": Architecture(roberta, "classification"),
    "albert": Architecture(albert, "classification"),
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
    "bert_choice": Architecture(builder(hf.BertForMultipleChoice, hf.BertConfig, **ENCODER), "choice"),
    "bert_masked_lm": Architecture(bert_masked_lm, "masked_lm"),
    "roberta_masked_lm": Architecture(builder(hf.RobertaForMaskedLM, hf.RobertaConfig, **ENCODER, pad_token_id=1), "masked_lm"),
    "infilling_bert": _infilling_classifier(hf.BertForMaskedLM, hf.BertConfig),
    "gpt2_classifier": Architecture(gpt2_classifier, "classification"),
    "gpt2_tied": Architecture(gpt2, "causal_lm"),
    "gpt2_untied": Architecture(gpt2_untied, "causal_lm"),
    "opt": Architecture(builder(hf.OPTForCausalLM, hf.OPTConfig, **_OPT), "causal_lm"),
    "llama": Architecture(llama, "causal_lm", float32_inside=True),
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
    "falcon": _language_model(hf.FalconForCausalLM, hf.FalconConfig, **DECODER, new_decoder_architecture=True, bias=True),
    "mixtral": Architecture(mixtral, "causal_lm", float32_inside=True),
    "qwen3_moe": Architecture(qwen3_moe, "causal_lm", float32_inside=True),
    "olmoe": Architecture(olmoe, "causal_lm", float32_inside=True),
    "t5": Architecture(builder(hf.T5ForConditionalGeneration, hf.T5Config, **_T5), "seq2seq", float32_inside=True),
    "bart_classifier": Architecture(
        builder(hf.BartForSequenceClassification, hf.BartConfig, **_BART, num_labels=LABELS), "classification", end=2
    ),
    "bart": Architecture(builder(hf.BartForConditionalGeneration, hf.BartConfig, **_BART), "seq2seq"),
    "vit": Architecture(builder(hf.ViTForImageClassification, hf.ViTConfig, **_VIT), "image"),
    "dinov2": Architecture(builder(hf.Dinov2ForImageClassification, hf.Dinov2Config, **_VIT), "image"),
    "convnext": Architecture(builder(hf.ConvNextForImageClassification, hf.ConvNextConfig, **_CONVNEXT, num_labels=LABELS), "image"),
    "bit": Architecture(builder(hf.BitForImageClassification, hf.BitConfig, **_BIT, num_labels=LABELS), "image"),
}  # fmt: skip

# Those whose losses and batches :func:`batch_for` knows.
CLASSIFIERS = ("bert", "roberta", "distilbert", "albert", "gpt2_classifier")
LANGUAGE_MODELS = ("gpt2_tied", "gpt2_untied", "llama")
BUILDERS = {name: ARCHITECTURES[name].build for name in (*CLASSIFIERS, *LANGUAGE_MODELS)}

# One for each rule: Linear, Embedding and LayerNorm; Conv1D and ties; RMSNorm; scaled, shifted, (T,
# T) look-ups; flattened positions; convolutions; bare parameters; a bias tied to a module without a
# rule; label words. (The others: clipping/test_exactness.py.)
EACH_RULE = [
    "bert", "gpt2_tied", "llama", "gemma3", "opt", "mpnet", "t5", "bart", "bert_masked_lm", "vit", "dinov2", "convnext",
    "bit", "infilling_bert",
]  # fmt: skip

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
# Decoders that classify by a word of one token, or by words of several.
DECODERS = ("gpt2_tied", "gpt2_untied", "opt", "llama", "qwen2", "qwen3_tied", "gemma2", "gpt_neox")
INFILLING |= {
    f"{name} one token": _by_words(ARCHITECTURES[name], ONE_TOKEN, None) for name in DECODERS
}
INFILLING |= {
    f"{name} several": _by_words(ARCHITECTURES[name], SEVERAL, None)
    for name in DECODERS
    if name != "gemma2"  # which changes its logits after the head
}


def shaken(model: Any) -> Any:
    """The model with what trains away from PEFT's zeros and ones, which hide gradients."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def built(
    name: str, lengths: Sequence[int], **options: Any
) -> tuple[Architecture, Any, list[Batch]]:
    """An architecture, its model, and examples of these lengths."""
    architecture = ARCHITECTURES[name]
    model = architecture.build(**options)
    return architecture, model, architecture.examples(model, lengths)


def base_of(model: Any) -> nn.Module:
    """The transformers model inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_language_model(model: nn.Module) -> bool:
    writes = type(model).__name__.endswith(("LMHeadModel", "ForCausalLM"))
    return writes and not hasattr(model, "label_words")  # with which it classifies


# -- examples, and batches of them ---


def _tokens(count: int, generator: torch.Generator) -> Tensor:
    tokens = torch.randint(4, VOCABULARY, (1, count), generator=generator)
    tokens[:, ::3] = 7  # equal tokens in one example: their rows must be added before squaring
    return tokens


def collate(model: Any, examples: Sequence[Batch], left: bool = False) -> Batch:
    """The examples as one padded batch, with an attention mask where there are tokens."""
    pad = getattr(base_of(model).config, "pad_token_id", None) or 0
    fill = {"input_ids": pad, "decoder_input_ids": pad, "labels": IGNORED}
    if "input_ids" in examples[0]:
        examples = [{"attention_mask": torch.ones_like(e["input_ids"]), **e} for e in examples]
    columns = {name: [example[name] for example in examples] for name in examples[0]}
    return {name: _padded(each, fill.get(name, 0), left) for name, each in columns.items()}


def _padded(tensors: Sequence[Tensor], value: int, left: bool) -> Tensor:
    if tensors[0].dim() not in (2, 3):
        return torch.cat(list(tensors))
    longest = max(t.shape[-1] for t in tensors)
    missing = [longest - t.shape[-1] for t in tensors]
    sides = [(n, 0) if left else (0, n) for n in missing]
    return torch.cat([F.pad(t, n, value=value) for t, n in zip(tensors, sides, strict=True)])


def batch_for(model: Any, lengths: Sequence[int], seed: int = 0, left: bool = False) -> Batch:
    """Random rows of these lengths, padded to the longest, with labels of the kind this model
    predicts."""
    task = "causal_lm" if is_language_model(base_of(model)) else "classification"
    return collate(model, Architecture(type(model), task).examples(model, lengths, seed), left)


def rows(batch: Mapping[str, Tensor], positions: Iterable[int]) -> Batch:
    """These rows, still padded but only as far as their longest needs (right padding)."""
    index = list(positions)
    longest = max(int(batch["attention_mask"][i].sum()) for i in index)
    return {
        name: value[index] if value.dim() == 1 else value[index, :longest]
        for name, value in batch.items()
    }


def alone(batch: Mapping[str, Tensor], position: int) -> Batch:
    """One row as a batch of one, without any padding."""
    real = batch["attention_mask"][position].bool()
    one = {name: value[position : position + 1] for name, value in batch.items()}
    return {name: value if value.dim() == 1 else value[:, real] for name, value in one.items()}


# -- losses: for the batch as a user writes them, for one example as the model has them ---


def logits(architecture: Architecture, model: Any, batch: Batch) -> Tensor:
    """What a model says of a batch, without its labels."""
    with architecture.precision(), torch.no_grad():
        return model(**{name: value for name, value in batch.items() if name != "labels"}).logits


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


def single(model: nn.Module, example: Mapping[str, Tensor]) -> Tensor:
    """The loss of a batch of one as transformers computes it: its mean is over this example alone.

    For causal models it is written out, because transformers rounds logits to float32 first;
    tests/test_losses.py compares with the model's own loss. 0 when there is nothing to predict,
    where transformers gives NaN.
    """
    if not is_language_model(base_of(model)):
        return model(**example).loss
    logits = model(input_ids=example["input_ids"]).logits[0, :-1]
    targets = example["labels"][0, 1:]
    count = max(int((targets != -100).sum()), 1)
    return F.cross_entropy(logits, targets, reduction="sum") / count


# -- the oracle ---


@dataclass
class Expected:
    """What a loop over single examples gives: norms (b,), and sums clipped to ``clipping_norm``."""

    norms: Tensor
    clipping_norm: float
    sums: dict[str, Tensor]


def gradients_of(
    model: nn.Module, examples: Iterable[Any], loss: Loss = single
) -> list[tuple[Tensor | None, ...]]:
    """Each example's gradients, in the order of :func:`trained`, by a backward pass of its own."""
    parameters = list(trained(model).values())
    return [torch.autograd.grad(loss(model, e), parameters, allow_unused=True) for e in examples]


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def loop(
    model: nn.Module,
    examples: Iterable[Any],
    loss: Loss = single,
    clipping_norm: float | None = None,
) -> Expected:
    """One backward pass an example, by plain autograd. Default clipping norm: some examples above,
    some below."""
    return clip(trained(model), gradients_of(model, examples, loss), clipping_norm)


def clip(
    trainable: Mapping[str, Tensor],
    found: Sequence[Sequence[Tensor | None]],
    clipping_norm: float | None = None,
) -> Expected:
    norms = torch.tensor([_norm(gradients) for gradients in found], dtype=torch.float64)
    if clipping_norm is None:
        # 0: nothing to predict in most examples
        clipping_norm = float(norms.median()) * 0.99 or 1.0
    sums = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in trainable.items()}
    for gradients, norm in zip(found, norms.tolist(), strict=True):
        for name, gradient in zip(trainable, gradients, strict=True):
            if gradient is not None:
                sums[name] += gradient.double() * (min(1.0, clipping_norm / norm) if norm else 1.0)
    return Expected(norms, clipping_norm, sums)


def _norm(gradients: Sequence[Tensor | None]) -> float:
    return sum(float(g.double().square().sum()) for g in gradients if g is not None) ** 0.5


def loop_over_losses(
    model: nn.Module, losses: Tensor, clipping_norm: float | None = None
) -> Expected:
    """What one forward of the whole batch gives: for dropout, whose masks belong to that
    forward."""
    parameters = list(trained(model).values())
    found = [
        torch.autograd.grad(each, parameters, retain_graph=True, allow_unused=True)
        for each in losses
    ]
    return clip(trained(model), found, clipping_norm)


def loop_over_rows(
    model: nn.Module, batch: Batch, clipping_norm: float | None = None, loss: Loss = single
) -> Expected:
    """The loop over the rows of a padded batch, each alone and unpadded."""
    examples = [alone(batch, position) for position in range(len(batch["input_ids"]))]
    return loop(model, examples, loss, clipping_norm)


# -- the engine, and both compared ---


def clip_losses(
    model: nn.Module, losses: Callable[[], Tensor], clipping_norm: float, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Norms and clipped sums of losses that are computed inside an engine."""
    with ClippingEngine(model, clipping_norm, **options) as engine:
        return engine.backward(losses()), engine.collect()


def clipped(
    model: nn.Module,
    batch: Any,
    clipping_norm: float,
    strategy: str = "book_keeping",
    loss: Loss = together,
    seed: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Norms and clipped sums of one batch by the engine; ``seed`` fixes the dropout masks."""

    def losses() -> Tensor:
        if seed is not None:
            torch.manual_seed(seed)
        return loss(model, batch)

    return clip_losses(model, losses, clipping_norm, strategy=strategy)


def example_norms(
    uses: Mapping[nn.Parameter, Sequence[PerExampleGradient]], examples: int
) -> tuple[Tensor, Tensor]:
    """Norms (b,) and their slack (b,) of all these parameters together, as the engine finds
    them."""
    table = ExampleNorms(dict.fromkeys(uses, 0), examples)
    table.add(uses)
    table.settle(uses)
    norms, slack = table.result()
    return norms[0], slack[0]


def disagreement(model: nn.Module, batch: Batch) -> float:
    """Largest relative difference of norms, or of sums relative to the clipping norm, between
    engine and loop."""
    expected = loop_over_rows(model, batch)
    norms, sums = clipped(model, batch, expected.clipping_norm)
    of_norms = (norms.double() - expected.norms).abs() / expected.norms.clamp_min(1e-12)
    of_sums = [(sums[n].double() - each).abs().max() for n, each in expected.sums.items()]
    return max(float(of_norms.max()), float(max(of_sums)) / expected.clipping_norm)


def assert_same_sums(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], atol: float
) -> None:
    assert list(actual) == list(expected)
    for name, each in expected.items():
        assert actual[name].shape == each.shape, name
        difference = (actual[name].double() - each.double()).abs()
        assert bool((difference <= atol).all()), f"{name}: {float(difference.max())} > {atol}"


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


def norm_of(sums: Mapping[str, Tensor]) -> float:
    """The norm of all sums together."""
    return float(torch.cat([total.flatten().double() for total in sums.values()]).norm())


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


# -- nets that a test writes down ---


class Net(nn.Module):
    """Named parts, and a function of the net and its input that says what they compute."""

    def __init__(self, compute: Callable[[Any, Any], Tensor], **parts: nn.Module):
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Any) -> Tensor:
        return self.compute(self, x)


class TinyTied(nn.Module):
    """Embedding, one linear layer, and a head tied to the embedding; the smallest thing with every
    kind of use."""

    def __init__(self, vocabulary: int = 11, width: int = 4, padding_idx: int | None = None):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=padding_idx)
        self.linear = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.linear(self.embedding(input_ids))))


def cancelling_linear() -> tuple[nn.Linear, Callable[[], Tensor], Tensor]:
    """A layer, losses v.(W a_1) - v.(W a_2) with nearly equal a, and their norms, which are of
    G = v (a_1 - a_2)^T."""
    torch.manual_seed(0)
    width = 256
    linear = nn.Linear(width, width, bias=False)
    direction, x = torch.randn(width), torch.randn(4, 1, width).expand(4, 2, width).clone()
    x[:, 1] += torch.tensor([1e-1, 1e-2, 1e-3, 1e-4])[:, None] * torch.randn(4, width)
    truths = direction.double().norm() * (x[:, 0].double() - x[:, 1].double()).norm(dim=1)
    return linear, lambda: linear(x) @ direction @ torch.tensor([1.0, -1.0]), truths


def assert_net_exact(model: nn.Module, x: Tensor, strategy: str = "book_keeping") -> None:
    """Norms and clipped sums of ``model(x)``, (b,), equal a loop over single examples."""
    expected = loop(model, x.split(1), lambda net, row: net(row)[0])
    found = clip_losses(model, lambda: model(x), expected.clipping_norm, strategy=strategy)
    assert_equal(*found, expected)


def assert_refused(model: nn.Module, x: Any, message: str) -> None:
    with ClippingEngine(model, 0.1) as engine, pytest.raises(UnsupportedModelError, match=message):
        engine.backward(model(x))


def assert_not_entered(model: nn.Module, message: str) -> None:
    """An engine refuses the model as it is entered, and leaves it as it was."""
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    with pytest.raises(UnsupportedModelError, match=message), ClippingEngine(model, 1.0):
        pass
    assert forwards == [module.__dict__.get("forward") for module in model.modules()]
    assert not model._forward_pre_hooks
