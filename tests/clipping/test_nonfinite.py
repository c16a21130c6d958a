"""An example whose gradient is not finite is removed, as if it had not been sampled."""

from __future__ import annotations

import pytest
import torch
from models import (
    BUILDERS,
    TinyTied,
    assert_same_sums,
    batch_for,
    bert,
    clip_losses,
    engine_result,
    example_norms,
    rows,
)
from torch import Tensor, nn

from hf_dp.clipping import ClippingEngine, self_check
from hf_dp.clipping.engine import STRATEGIES
from hf_dp.clipping.gradients import OuterProducts, PerExampleGradient
from hf_dp.clipping.rules.rule import RULES, Rule
from hf_dp.errors import SelfCheckError
from hf_dp.losses import per_example_loss

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
    """Compare the example with weight 0 and the example spoiled.

    The shapes are the same, so no rounding differs.
    """
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
    """The gradient is finite but its square is not, so its norm is unknown.

    A weight of C / inf would be 0 * x.
    """
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
