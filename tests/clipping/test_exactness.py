"""Norms and clipped sums equal a loop over single, unpadded examples in plain autograd; sums over
physical batches; and bugs of norms and sums that are planted.

These are invariants 2 and 12. Whole architectures are in test_architectures.py.
"""

import sys
from typing import Any

import models
import pytest
import torch
from models import (
    BUILDERS,
    LONG,
    SHORT,
    Net,
    TinyTied,
    assert_net_exact,
    assert_same_sums,
    batch_for,
    bert,
    clip_losses,
    disagreement,
    engine_result,
    example_norms,
    rows,
)
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from hf_dp.clipping import ClippingEngine, gradients, norms, self_check
from hf_dp.clipping.engine import STRATEGIES
from hf_dp.clipping.gradients import OuterProducts, PerExampleGradient
from hf_dp.clipping.rules.rule import RULES, Rule
from hf_dp.errors import SelfCheckError
from hf_dp.losses import per_example_loss

# float64: the engine orders sums differently from the loop, so a few hundred roundings of 1e-16;
# 1e-9 is the design's.
EXACT = 1e-9


@pytest.mark.parametrize("length", [1, 2, 12])
def test_a_module_used_twice(length):
    """One linear layer and one norm used twice, and an embedding looked up twice."""

    def losses(net: Any, tokens: Tensor) -> Tensor:
        x = net.norm(torch.tanh(net.linear(net.embedding(tokens))))
        x = net.norm(net.linear(x)) * net.embedding(tokens.flip(1) // 2)
        return x.sum((1, 2))

    torch.manual_seed(0)
    parts = {"embedding": nn.Embedding(9, 5), "linear": nn.Linear(5, 5), "norm": nn.LayerNorm(5)}
    assert_net_exact(Net(losses, **parts).double(), torch.randint(0, 9, (4, length)))


def test_reused_layers_of_different_lengths_and_forms():
    """One weight meets short sequences (outer products) and long ones (formed at once)."""

    def losses(net: Any, x: Tensor) -> Tensor:
        short, long = torch.tanh(net.linear(x[:, :2])), net.linear(torch.tanh(net.linear(x[:, 2:])))
        return short.sum((1, 2)) + torch.sin(long).sum((1, 2))

    torch.manual_seed(0)
    assert_net_exact(Net(losses, linear=nn.Linear(6, 6)).double(), torch.randn(3, 32, 6).double())


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("length", [1, 3, 40])
def test_tied_embedding_and_head(padding_idx, length):
    """A row at the padding index gets no gradient from look-ups but one from the head."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 11, (4, length))
    tokens[:, 0] = 3
    tied = TinyTied(padding_idx=padding_idx)
    model = Net(lambda net, tokens: torch.sin(net.tied(tokens)).mean(1).sum(1), tied=tied)
    assert_net_exact(model.double(), tokens)


@pytest.mark.parametrize("lengths", [SHORT, LONG[:2]], ids=str)
def test_a_tied_bias_owned_by_a_module_without_a_rule_is_counted_once(lengths):
    """BertLMPredictionHead owns the bias that its decoder adds."""

    def loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        logits = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        tokens = nn.functional.cross_entropy(logits.mT, inputs["labels"], reduction="none")
        return tokens.sum(1) / (inputs["labels"] != -100).sum(1)

    model = models.bert_masked_lm()
    assert model.cls.predictions.bias is model.cls.predictions.decoder.bias
    batch = batch_for(model, lengths)
    batch["labels"] = torch.where(batch["attention_mask"].bool(), batch["input_ids"], -100)
    assert disagreement(model, batch, loss=loss) < EXACT


@pytest.mark.parametrize("cuts", [[[2], [0, 3], [1]], [[0], [1], [2], [3]]], ids=len)
def test_physical_batches_do_not_change_the_sums(cuts):
    model = models.gpt2()
    batch = batch_for(model, SHORT)
    together, expected = engine_result(model, batch, 0.1)
    with ClippingEngine(model, 0.1) as engine:
        norms = [engine.backward(per_example_loss(model, rows(batch, cut))) for cut in cuts]
        sums = engine.collect()
    torch.testing.assert_close(torch.cat(norms), together[sum(cuts, [])], rtol=EXACT, atol=0)
    assert_same_sums(sums, expected, atol=EXACT)


def test_clipped_sum_of_one_example_has_the_clipping_norm():
    model = models.roberta()
    (norm,), sums = engine_result(model, batch_for(model, (6,)), 0.1)
    assert float(norm) > 0.1
    total = torch.stack([value.square().sum() for value in sums.values()]).sum().sqrt()
    torch.testing.assert_close(total, torch.tensor(0.1, dtype=torch.float64), rtol=1e-12, atol=0)


def test_collect_resets_and_backward_calls_add_up():
    model = models.bert()
    batch = batch_for(model, SHORT)
    with ClippingEngine(model, 1.0) as engine:
        engine.backward(per_example_loss(model, batch))
        once = engine.collect()
        engine.backward(per_example_loss(model, batch))
        engine.backward(per_example_loss(model, batch))
        twice = engine.collect()
        nothing = engine.collect()
    assert_same_sums(twice, {name: 2 * value for name, value in once.items()}, atol=EXACT)
    assert all(not value.any() for value in nothing.values())


def test_keys_are_the_trainable_parameters_and_unused_ones_get_zeros():
    model = models.gpt2()
    model.unused = nn.Linear(3, 2)
    model.transformer.ln_f.requires_grad_(False)
    _, sums = engine_result(model, batch_for(model, SHORT), 1.0)
    expected = [(n, p.shape) for n, p in model.named_parameters() if p.requires_grad]
    assert [(name, total.shape) for name, total in sums.items()] == expected
    assert not sums["unused.weight"].any() and not sums["unused.bias"].any()


def test_padding_idx_gets_no_gradient():
    model = TinyTied(padding_idx=0).double()
    tokens = torch.tensor([[1, 2, 0, 0], [3, 0, 3, 1]])
    with ClippingEngine(model, 1e9) as engine:
        engine.backward(model.embedding(tokens).square().sum((1, 2)))
        total = engine.collect()["embedding.weight"]
    assert not total[0].any() and total[3].any()


def test_lora_under_gradient_checkpointing_with_frozen_embeddings():
    torch.manual_seed(1)
    config = LoraConfig(
        r=2, target_modules=["query", "value"], init_lora_weights=False, task_type="SEQ_CLS"
    )
    model: Any = get_peft_model(models.bert(), config).double().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert disagreement(model, batch_for(model, SHORT)) < EXACT


@pytest.mark.parametrize("name", ["bert", "gpt2_tied"])
def test_broadcast_position_ids(name):
    """Positions of shape (1, T), shared by the batch, must agree with explicit (b, T)."""
    model = BUILDERS[name]()
    batch = batch_for(model, (8, 3, 5))
    position_ids = torch.arange(8).expand(3, 8)
    key = "position_embeddings.weight" if name == "bert" else "wpe.weight"
    norms, sums = engine_result(model, batch, 1.0)
    found_norms, found_sums = engine_result(model, {**batch, "position_ids": position_ids}, 1.0)
    torch.testing.assert_close(found_norms, norms, rtol=1e-12, atol=0)
    assert_same_sums(found_sums, sums, atol=1e-12)
    assert all(value[:8].any() for name_, value in sums.items() if name_.endswith(key))


@pytest.mark.parametrize("build", [models.gpt2, models.albert], ids=["tied", "reused"])
def test_planted_missing_inner_product_is_seen(build, monkeypatch):
    original = norms.inner_product
    monkeypatch.setattr(norms, "inner_product", lambda a, b: tuple(0 * x for x in original(a, b)))
    model = build()
    assert disagreement(model, batch_for(model, SHORT)) > 1e-3


def test_planted_unclipped_layer_is_seen(monkeypatch):
    original = gradients.OuterProducts.weighted_factors

    def unclipped(self, weights):
        of_that_layer = (self.left.shape[2], self.right.shape[2]) == (24, 16)
        return original(
            self, gradients.Weights(torch.ones_like(weights.values)) if of_that_layer else weights
        )

    monkeypatch.setattr(gradients.OuterProducts, "weighted_factors", unclipped)
    model = models.bert()
    assert disagreement(model, batch_for(model, SHORT)) > 1e-3


def test_planted_half_norm_in_one_rule_is_seen(monkeypatch):
    linear = sys.modules["hf_dp.clipping.rules.affine"]
    monkeypatch.setattr(
        linear, "OuterProducts", lambda left, right: gradients.OuterProducts(left / 2, right)
    )
    model = models.bert()
    assert disagreement(model, batch_for(model, SHORT)) > 1e-3


# -- examples that are not finite are removed, as if they had not been sampled ---

LENGTHS = (6, 3, 6, 2)
OTHERS = [0, 2, 3]


class Scale(nn.Module):
    """Has a rule that a user registered."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


NO_ARCHITECTURE_HAS = {
    "group norm": lambda: nn.GroupNorm(2, 4),
    "torch's RMS norm": lambda: nn.RMSNorm(4),
    "own": Scale,
}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", NO_ARCHITECTURE_HAS)
def test_rules_that_no_architecture_uses(name, strategy, value, monkeypatch):
    rule = Rule(lambda use, kept, grad: {"scale": (kept[0] * grad).sum(1)})
    monkeypatch.setitem(RULES, Scale, rule)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), NO_ARCHITECTURE_HAS[name](), nn.Linear(4, 2))
    x = torch.randn(3, 4, 3)  # also as (examples, channels, positions)

    def result(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        losses = lambda: model(x).square().sum((1, 2))  # noqa: E731
        return clip_losses(model, losses, 0.5, strategy=strategy)

    expected_norms, expected = result(x[[0, 2]])
    x[1, 0, 0] = value
    norms, sums = result(x)
    assert norms[1] == torch.inf
    torch.testing.assert_close(norms[[0, 2]], expected_norms, rtol=1e-5, atol=0)
    assert_same_sums(sums, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", "gpt2_tied", "llama", "albert"])
def test_bit_for_bit_the_sum_without_it(name):
    """Compare the example with weight 0 and the example spoiled. The shapes are the same, so no
    rounding differs."""
    model = BUILDERS[name](dtype=torch.float32)
    batch = batch_for(model, LENGTHS)

    def sums(factor: float) -> dict[str, Tensor]:
        factors = torch.tensor([1.0, factor, 1.0, 1.0])
        return clip_losses(model, lambda: per_example_loss(model, batch) * factors, 0.5)[1]

    nothing = sums(0.0)
    for value in (torch.nan, torch.inf):
        found = sums(value)
        assert all(torch.equal(found[key], nothing[key]) for key in nothing)


def test_a_whole_batch_can_go():
    model = bert()
    batch = batch_for(model, LENGTHS)
    norms, sums = clip_losses(model, lambda: per_example_loss(model, batch) * torch.nan, 0.5)
    assert torch.isinf(norms).all()
    assert not any(value.any() for value in sums.values())


def test_earlier_and_later_batches_are_kept():
    model = bert()
    batch = batch_for(model, LENGTHS)
    _, expected = engine_result(model, rows(batch, [0, 2]), 0.5)
    with ClippingEngine(model, 0.5) as engine:
        engine.backward(per_example_loss(model, rows(batch, [0])))
        engine.backward(per_example_loss(model, rows(batch, [1])) * torch.nan)
        engine.backward(per_example_loss(model, rows(batch, [2])))
        assert_same_sums(engine.collect(), expected, atol=1e-12)


@pytest.mark.parametrize("scale", [1e20, 1e30, 1e38])
def test_a_norm_that_overflows_float32_removes_its_example(scale):
    """The gradient is finite but its square is not, so its norm is unknown. A weight of C / inf
    would be 0 * x."""
    torch.manual_seed(0)
    model = TinyTied()
    tokens = torch.randint(0, 11, (3, 4))
    factors = torch.tensor([1.0, scale, 1.0])
    losses = lambda tokens: model(tokens).square().mean((1, 2))  # noqa: E731
    norms, sums = clip_losses(model, lambda: losses(tokens) * factors, 0.5)
    _, expected = clip_losses(model, lambda: losses(tokens[[0, 2]]), 0.5)
    assert norms[1] == torch.inf
    assert_same_sums(sums, expected, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-20, 1e-30, 1e-40])
def test_a_norm_that_underflows_adds_next_to_nothing(scale):
    model, tokens = TinyTied(), torch.zeros(2, 3, dtype=torch.long)
    norms, sums = clip_losses(model, lambda: model(tokens).square().mean((1, 2)) * scale, 0.5)
    assert torch.isfinite(norms).all()
    assert all(float(value.abs().max()) <= 1e-15 for value in sums.values())


def test_the_self_check_refuses_a_model_that_is_not_finite():
    model = bert()
    with torch.no_grad():
        model.classifier.weight.fill_(torch.nan)
    batch = batch_for(model, (3, 5))
    with pytest.raises(SelfCheckError):
        self_check(model, per_example_loss, batch, [rows(batch, [0]), rows(batch, [1])])


def test_a_squared_norm_of_minus_infinity_is_not_a_small_one():
    """Products that overflow can sum to -inf; clamped to 0, the example would be unclipped."""
    left = torch.tensor([[[1e20, 1.0], [-1e20, 1.0]], [[1.0, 2.0], [0.5, 0.1]]])
    right = torch.tensor([[[1.0, 1e20], [1.0, 1e20]], [[1.0, 1.0], [1.0, 2.0]]])
    norms, _ = example_norms(
        {torch.nn.Parameter(torch.zeros(2, 2)): [OuterProducts(left, right)]}, 2
    )
    assert torch.isinf(norms[0])
    assert torch.isfinite(norms[1])


def test_planted_product_with_a_nan_is_seen(monkeypatch):
    monkeypatch.setattr(PerExampleGradient, "keep_only", lambda self, keep: None)
    model, factor = bert(), torch.tensor([1.0, torch.nan, 1.0, 1.0], dtype=torch.float64)
    batch = batch_for(model, LENGTHS)
    _, sums = clip_losses(model, lambda: per_example_loss(model, batch) * factor, 0.1)
    assert any(torch.isnan(total).any() for total in sums.values())
