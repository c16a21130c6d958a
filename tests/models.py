"""Tiny random models built from configs, batches of unequal lengths, and the oracle the tests
compare against.

The oracle shares no code with hf_dp: one example at a time, unpadded, the model's *own* loss, plain
autograd. It is exact because in a batch of one a batch mean is the example's loss.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Mapping[str, Any]], Tensor]

VOCABULARY = 61
POSITIONS = 40
LABELS = 3
SHORT = (5, 1, 3, 4)  # every weight gradient of the tiny models is kept as outer products
LONG = (19, 1, 8, 19)  # most are formed at once: d x d < T (d + d)

# Tests that take a device run on the CPU, and with `pytest -m gpu` on a GPU.
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]),
]  # fmt: skip


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
llama = builder(hf.LlamaForCausalLM, hf.LlamaConfig, **DECODER)  # LlamaRMSNorm has no rule

CLASSIFIERS: dict[str, Callable[..., Any]] = {
    "bert": bert,
    "roberta": roberta,
    "distilbert": distilbert,
    "albert": albert,
    "gpt2_classifier": gpt2_classifier,
}
LANGUAGE_MODELS: dict[str, Callable[..., Any]] = {
    "gpt2_tied": gpt2,
    "gpt2_untied": gpt2_untied,
    "llama": llama,
}
BUILDERS: dict[str, Callable[..., Any]] = CLASSIFIERS | LANGUAGE_MODELS


def base_of(model: Any) -> nn.Module:
    """The transformers model inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_language_model(model: nn.Module) -> bool:
    return type(model).__name__.endswith(("LMHeadModel", "ForCausalLM"))


def batch_for(model: Any, lengths: Sequence[int], seed: int = 0, left: bool = False) -> Batch:
    """Random rows of these lengths, padded to the longest, with labels of the kind this model
    predicts."""
    generator = torch.Generator().manual_seed(seed)
    base: Any = base_of(model)
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


def own_loss(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    return single(model, inputs)[None]


@dataclass
class Expected:
    """What a loop over single examples gives: norms (b,), and sums clipped to ``clipping_norm``."""

    norms: Tensor
    clipping_norm: float
    sums: dict[str, Tensor]


def loop(
    model: nn.Module,
    examples: Sequence[Any],
    loss: Callable[[nn.Module, Any], Tensor] = single,
    clipping_norm: float | None = None,
) -> Expected:
    """One backward pass an example, by plain autograd. Default clipping norm: some examples above,
    some below."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = [
        torch.autograd.grad(loss(model, e), list(trainable.values()), allow_unused=True)
        for e in examples
    ]
    return clip(trainable, found, clipping_norm)


def clip(
    trainable: dict[str, nn.Parameter],
    found: Sequence[Sequence[Tensor | None]],
    clipping_norm: float | None,
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


def loop_oracle(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    clipping_norm: float | None,
    loss: Loss = own_loss,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Norms (b,) and clipped sums of the rows of a padded batch, each alone and unpadded."""
    expected = _loop_over_rows(model, batch, clipping_norm, loss)
    return expected.norms, expected.sums


def _loop_over_rows(
    model: nn.Module, batch: Mapping[str, Tensor], clipping_norm: float | None, loss: Loss
) -> Expected:
    examples = [alone(batch, position) for position in range(len(batch["input_ids"]))]
    return loop(model, examples, lambda m, example: loss(m, example)[0], clipping_norm)


def engine_result(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    clipping_norm: float,
    *,
    strategy: str = "book_keeping",
    loss: Loss = per_example_loss,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Norms and clipped sums of a batch, as the engine finds them."""
    return clip_losses(model, lambda: loss(model, batch), clipping_norm, strategy=strategy)


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
    expected = _loop_over_rows(model, batch, clipping_norm, alone)
    norms, sums = engine_result(model, batch, expected.clipping_norm, loss=together, **options)
    assert list(sums) == list(expected.sums)
    of_norms = (norms.double() - expected.norms).abs() / expected.norms.clamp_min(1e-12)
    of_sums = [(sums[n].double() - each).abs().max() for n, each in expected.sums.items()]
    return max(float(of_norms.max()), float(max(of_sums)) / expected.clipping_norm)


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


class Net(nn.Module):
    """Named parts, and a function of the net and its input that says what they compute."""

    def __init__(self, compute: Callable[[Any, Any], Tensor], **parts: nn.Module):
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Any) -> Tensor:
        return self.compute(self, x)


def clip_losses(
    model: nn.Module, losses: Callable[[], Tensor], clipping_norm: float, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Norms and clipped sums of losses that are computed inside an engine."""
    with ClippingEngine(model, clipping_norm, **options) as engine:
        return engine.backward(losses()), engine.collect()


def norm_of(sums: Mapping[str, Tensor]) -> float:
    """The norm of all sums together."""
    return float(torch.cat([total.flatten().double() for total in sums.values()]).norm())


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


def assert_net_exact(model: nn.Module, x: Tensor, strategy: str = "book_keeping") -> None:
    """Norms and clipped sums of ``model(x)``, (b,), equal a loop over single examples."""
    expected = loop(model, x.split(1), lambda net, row: net(row)[0])
    norms, sums = clip_losses(model, lambda: model(x), expected.clipping_norm, strategy=strategy)
    torch.testing.assert_close(norms, expected.norms, rtol=1e-9, atol=1e-12)
    assert_same_sums(sums, expected.sums, atol=1e-9 * expected.clipping_norm)


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
