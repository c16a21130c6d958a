"""Tiny random models built from configs, batches of unequal lengths, and the oracle the tests
compare against.

The oracle shares no code with hf_dp: one example at a time, unpadded, the model's *own* loss, plain
autograd. It is exact because in a batch of one a batch mean is the example's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from hf_dp.clipping import ClippingEngine
from hf_dp.clipping.gradients import PerExampleGradient
from hf_dp.clipping.norms import ExampleNorms
from hf_dp.losses import per_example_loss

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Mapping[str, Any]], Tensor]

VOCABULARY = 61
POSITIONS = 40
SHORT = (5, 1, 3, 4)  # every weight gradient of the tiny models is kept as outer products
LONG = (19, 1, 8, 19)  # most are formed at once: d x d < T (d + d)

# Tests that take a device run on the CPU, and with `pytest -m gpu` on a GPU.
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]


def on(device: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """These tensors on this device."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _ready(model: nn.Module, dtype: torch.dtype) -> Any:
    """Away from the symmetric initialisation: biases and norms get random values, so no gradient
    vanishes by chance."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.to(dtype).train()


def _encoder(dropout: float) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": POSITIONS,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "num_labels": 3,
    }


def bert(
    dropout: float = 0.0, dtype: torch.dtype = torch.float64, **overrides: Any
) -> BertForSequenceClassification:
    torch.manual_seed(0)
    return _ready(BertForSequenceClassification(BertConfig(**_encoder(dropout) | overrides)), dtype)


def bert_masked_lm(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> BertForMaskedLM:
    """Tied decoder weight *and* bias: the bias belongs to two modules, one of them without a
    rule."""
    torch.manual_seed(0)
    return _ready(BertForMaskedLM(BertConfig(**_encoder(dropout))), dtype)


def roberta(
    dropout: float = 0.0, dtype: torch.dtype = torch.float64
) -> RobertaForSequenceClassification:
    torch.manual_seed(0)
    return _ready(
        RobertaForSequenceClassification(RobertaConfig(**_encoder(dropout), pad_token_id=1)), dtype
    )


def distilbert(
    dropout: float = 0.0, dtype: torch.dtype = torch.float64
) -> DistilBertForSequenceClassification:
    torch.manual_seed(0)
    config = DistilBertConfig(
        vocab_size=VOCABULARY, dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=POSITIONS,
        dropout=dropout, attention_dropout=dropout, seq_classif_dropout=dropout, num_labels=3,
    )  # fmt: skip
    return _ready(DistilBertForSequenceClassification(config), dtype)


def albert(
    dropout: float = 0.0, dtype: torch.dtype = torch.float64
) -> AlbertForSequenceClassification:
    """One layer used three times."""
    torch.manual_seed(0)
    config = AlbertConfig(
        **_encoder(dropout) | {"num_hidden_layers": 3},
        embedding_size=8,
        classifier_dropout_prob=dropout,
    )
    return _ready(AlbertForSequenceClassification(config), dtype)


def _gpt2_config(dropout: float, **overrides: Any) -> GPT2Config:
    return GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_inner=24, n_positions=POSITIONS, resid_pdrop=dropout,
        embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=2, eos_token_id=3, pad_token_id=0, **overrides,
    )  # fmt: skip


def gpt2(
    tied: bool = True, dropout: float = 0.0, dtype: torch.dtype = torch.float64
) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return _ready(GPT2LMHeadModel(_gpt2_config(dropout, tie_word_embeddings=tied)), dtype)


def gpt2_classifier(
    dropout: float = 0.0, dtype: torch.dtype = torch.float64
) -> GPT2ForSequenceClassification:
    torch.manual_seed(0)
    return _ready(GPT2ForSequenceClassification(_gpt2_config(dropout, num_labels=3)), dtype)


def llama(
    dropout: float = 0.0, dtype: torch.dtype = torch.float64, **overrides: Any
) -> LlamaForCausalLM:
    """LlamaRMSNorm has no rule."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=24, max_position_embeddings=POSITIONS, attention_dropout=dropout, bos_token_id=2, eos_token_id=3,
        pad_token_id=0, **overrides,
    )  # fmt: skip
    return _ready(LlamaForCausalLM(config), dtype)


CLASSIFIERS: dict[str, Callable[..., Any]] = {
    "bert": bert,
    "roberta": roberta,
    "distilbert": distilbert,
    "albert": albert,
    "gpt2_classifier": gpt2_classifier,
}
LANGUAGE_MODELS: dict[str, Callable[..., Any]] = {
    "gpt2_tied": gpt2,
    "gpt2_untied": lambda **options: gpt2(tied=False, **options),
    "llama": llama,
}
BUILDERS: dict[str, Callable[..., Any]] = CLASSIFIERS | LANGUAGE_MODELS


def is_language_model(model: nn.Module) -> bool:
    return type(model).__name__.endswith(("LMHeadModel", "ForCausalLM"))


def batch_for(model: Any, lengths: Sequence[int], seed: int = 0, left: bool = False) -> Batch:
    """Random rows of these lengths, padded to the longest, with labels of the kind this model
    predicts."""
    generator = torch.Generator().manual_seed(seed)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    pad = base.config.pad_token_id if base.config.pad_token_id is not None else 0
    longest, count = max(lengths), len(lengths)
    tokens = torch.randint(4, VOCABULARY, (count, longest), generator=generator)
    tokens[:, ::3] = 7  # equal tokens in one example: their rows must be added before squaring
    position = torch.arange(longest)
    sizes = torch.tensor(lengths)[:, None]
    real = position >= longest - sizes if left else position < sizes
    inputs = {"input_ids": torch.where(real, tokens, pad), "attention_mask": real.long()}
    if is_language_model(base):
        inputs["labels"] = torch.where(real, tokens, -100)
    else:
        inputs["labels"] = torch.randint(0, 3, (count,), generator=generator)
    return inputs


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
    return {
        name: value[position : position + 1]
        if value.dim() == 1
        else value[position : position + 1, real]
        for name, value in batch.items()
    }


def own_loss(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """The loss of a batch of one, shape (1,), as transformers computes it: its mean is over this
    example alone.

    For language models it is written out, because transformers rounds logits to float32 first;
    tests/test_losses.py compares with the model's own loss. 0 when there is nothing to predict,
    where transformers gives NaN.
    """
    if "labels" in inputs and inputs["labels"].dim() == 1:
        return model(**inputs).loss[None]
    logits = model(input_ids=inputs["input_ids"]).logits[0, :-1]
    targets = inputs["labels"][0, 1:]
    kept = targets != -100
    return F.cross_entropy(logits[kept], targets[kept], reduction="sum")[None] / max(
        int(kept.sum()), 1
    )


def loop_oracle(
    model: nn.Module, batch: Mapping[str, Tensor], clipping_norm: float, loss: Loss = own_loss
) -> tuple[Tensor, dict[str, Tensor]]:
    """Norms (b,) and clipped sums in float64, one unpadded example at a time, without hf_dp."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in trainable.items()}
    norms = []
    for position in range(len(batch["input_ids"])):
        value = loss(model, alone(batch, position))[0]
        found = torch.autograd.grad(value, list(trainable.values()), allow_unused=True)
        gradients = [None if g is None else g.double() for g in found]
        norm = sum(float(g.square().sum()) for g in gradients if g is not None) ** 0.5
        norms.append(norm)
        for name, gradient in zip(trainable, gradients, strict=True):
            if gradient is not None:
                sums[name] += gradient * (min(1.0, clipping_norm / norm) if norm else 1.0)
    return torch.tensor(norms, dtype=torch.float64), sums


def engine_result(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    clipping_norm: float,
    *,
    strategy: str = "book_keeping",
    cuts: Sequence[Sequence[int]] | None = None,
    loss: Loss = per_example_loss,
) -> tuple[Tensor, dict[str, Tensor]]:
    """What the engine makes of a logical batch cut into these physical ones: norms in the batch's
    order, and sums."""
    count = len(batch["input_ids"])
    cuts = [range(count)] if cuts is None else cuts  # type: ignore[list-item]
    norms: list[Tensor] = [torch.empty(0)] * count
    with ClippingEngine(model, clipping_norm, strategy=strategy) as engine:
        for cut in cuts:
            for position, norm in zip(
                cut, engine.backward(loss(model, rows(batch, cut))), strict=True
            ):
                norms[position] = norm
        return torch.stack(norms), engine.collect()


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


def middle_norm(norms: Tensor) -> float:
    """A clipping norm between the examples', so that some are clipped and some are not."""
    return float(norms.double().median()) * 0.99


def disagreement(
    model: nn.Module,
    batch: Batch,
    clipping_norm: float | None = None,
    loss: Loss | None = None,
    **options: Any,
) -> float:
    """Largest relative difference of norms, or of sums relative to the clipping norm, between
    engine and loop."""
    alone, together = (own_loss, per_example_loss) if loss is None else (loss, loss)
    expected_norms, expected = loop_oracle(model, batch, clipping_norm or 1e9, alone)
    if clipping_norm is None:
        clipping_norm = middle_norm(expected_norms) or 1.0  # 0: rows with nothing to predict
        expected_norms, expected = loop_oracle(model, batch, clipping_norm, alone)
    got_norms, got = engine_result(model, batch, clipping_norm, loss=together, **options)
    assert list(got) == list(expected)
    of_norms = float(
        ((got_norms.double() - expected_norms).abs() / expected_norms.clamp_min(1e-12)).max()
    )
    of_sums = (
        max(float((got[name].double() - expected[name]).abs().max()) for name in expected)
        / clipping_norm
    )
    return max(of_norms, of_sums)


def assert_same_sums(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], atol: float
) -> None:
    assert list(actual) == list(expected)
    for name in expected:
        torch.testing.assert_close(
            actual[name].double(),
            expected[name].double(),
            rtol=0,
            atol=atol,
            msg=lambda text, n=name: f"{n}: {text}",
        )


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
