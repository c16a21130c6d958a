"""A norm is never taken for small because its terms cancelled."""

from __future__ import annotations

import functools
import sys

import pytest
import torch
from models import example_norms
from torch.nn import functional as F

from hf_dp.clipping import ClippingEngine, gradients, grams, norms
from hf_dp.clipping.gradients import (
    Dense,
    Lookups,
    OuterProducts,
    PerExampleGradient,
    Weights,
    summed,
)
from hf_dp.clipping.grams import LastOf, gram_blocks, outer_norms
from hf_dp.clipping.norms import inner_product
from hf_dp.plans.rounding import slack_cap


def exact_norm(parameter: torch.Tensor, uses: list[PerExampleGradient]) -> torch.Tensor:
    examples = len(uses[0].left) if isinstance(uses[0], OuterProducts) else len(uses[0].grads)
    totals = [
        sum(use.example_gradient(i, parameter.shape) for use in uses) for i in range(examples)
    ]
    return torch.stack([total.norm() for total in totals])


def cancelling(length: int, width: int, remainder: float) -> OuterProducts:
    """Return pairs of positions that cancel: terms are 1/remainder larger than the result."""
    generator = torch.Generator().manual_seed(length + width)
    left = torch.randn(2, length // 2, width, generator=generator)
    right = 1 + 0.1 * torch.randn(2, length // 2, width, generator=generator)
    left = torch.cat([left, -left * (1 - remainder)], 1)
    return OuterProducts(left, torch.cat([right, right], 1))


@pytest.mark.parametrize("remainder", [1e-2, 1e-3, 1e-4, 1e-5, 1e-6])
@pytest.mark.parametrize(("length", "width"), [(8, 16), (64, 128), (128, 256)])
def test_cancelling_positions(length, width, remainder):
    use = cancelling(length, width, remainder)
    weight = torch.nn.Parameter(torch.zeros(width, width))
    got = example_norms({weight: [use]}, 2)[0].double()
    torch.testing.assert_close(got, exact_norm(weight, [use]), rtol=1e-4, atol=0)


def test_planted_trust_in_the_gram_sum_is_seen(monkeypatch):
    """Without the second look a norm comes out far off, so the tests above do guard something."""
    monkeypatch.setattr(norms, "_TOLERANCE", float("inf"))
    use = cancelling(128, 256, 1e-6)
    weight = torch.nn.Parameter(torch.zeros(256, 256))
    got = example_norms({weight: [use]}, 2)[0].double()
    assert ((got / exact_norm(weight, [use]) - 1).abs() > 0.01).any()


@pytest.mark.parametrize("remainder", [1e-1, 1e-3, 1e-5, 1e-7])
def test_cancelling_tied_uses(remainder):
    """A head whose gradient is nearly minus the embedding's.

    |G_u|^2 + |G_v|^2 + 2 <G_u, G_v> cancels.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.arange(12).repeat(2, 1)
    right = torch.randn(2, 12, 8, generator=generator) * 30
    one_hot = torch.nn.functional.one_hot(tokens, 20).float()
    head, embedding = OuterProducts(one_hot, right), Lookups(tokens, -right * (1 - remainder))
    weight = torch.nn.Parameter(torch.zeros(20, 8))
    got = example_norms({weight: [head, embedding]}, 2)[0].double()
    torch.testing.assert_close(got, exact_norm(weight, [head, embedding]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", ["random", "coherent", "cancelling", "aligned"])
@pytest.mark.parametrize(("length", "width"), [(16, 64), (128, 384), (512, 256)])
def test_the_claimed_rounding_error_covers_the_real_one(kind, length, width):
    generator = torch.Generator().manual_seed(1)
    left = torch.randn(4, length, width, generator=generator)
    right = torch.randn(4, length, width, generator=generator)
    if kind == "coherent":
        left, right = left + 3, right + 3
    elif kind == "cancelling":
        left = torch.cat([left[:, ::2], -left[:, ::2]], 1)
        right = right.mean(1, keepdim=True).expand(-1, length, -1)
    elif kind == "aligned":
        left, right = left[:, :1].expand(-1, length, -1), right[:, :1].expand(-1, length, -1)
    use = OuterProducts(left.contiguous(), right.contiguous())
    found = use.norms()
    true = torch.stack(
        [use.example_gradient(i, torch.Size((width, width))).square().sum() for i in range(4)]
    )
    assert ((found.squared.double() - true).abs() <= found.error.double()).all()


def test_ordinary_gradients_do_not_take_the_slow_path():
    generator = torch.Generator().manual_seed(2)
    left, right = (
        torch.randn(16, 128, 64, generator=generator),
        1 + torch.randn(16, 128, 64, generator=generator),
    )
    found = OuterProducts(left, right).norms()
    assert (found.error < norms._TOLERANCE * found.squared).all()


def test_mixed_inner_products_equal_the_explicit_product():
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 20, (3, 5), generator=generator)
    lookups = Lookups(tokens, torch.randn(3, 5, 8, generator=generator).double())
    outer = OuterProducts(*(torch.randn(3, 7, n, generator=generator).double() for n in (20, 8)))
    from hf_dp.clipping.gradients import Dense

    dense = Dense(torch.randn(3, 20, 8, generator=generator).double())
    for one, other in ((outer, lookups), (lookups, outer), (dense, outer), (dense, lookups)):
        got, _ = inner_product(one, other)
        shape = torch.Size((20, 8))
        expected = torch.stack(
            [
                (one.example_gradient(i, shape) * other.example_gradient(i, shape)).sum()
                for i in range(3)
            ]
        )
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_a_remembered_gram_matrix_is_that_of_the_same_numbers():
    """The memory holds what it knows by address, so it keeps it alive and sees changes in place."""
    generator = torch.Generator().manual_seed(4)
    right = torch.randn(2, 66, 8, generator=generator)
    grams = LastOf(gram_blocks)
    for change in (lambda: None, lambda: None, lambda: right.mul_(2)):
        change()
        left = torch.randn(2, 66, 4, generator=generator)
        alone, remembered = (
            OuterProducts(left, right).norms(),
            OuterProducts(left, right).norms(grams),
        )
        assert torch.equal(alone.squared, remembered.squared)
        assert torch.equal(alone.error, remembered.error)
    other = OuterProducts(left, right.roll(1, 1))
    assert not torch.allclose(other.norms(grams).squared, remembered.squared)


@pytest.mark.parametrize("together", [1, 2**18])
def test_uses_reduced_together_have_the_norms_they_have_alone(together, monkeypatch):
    """Norms come in order, for any lengths in succession, with halved matrices among them.

    It does not matter how many fit together.
    """
    monkeypatch.setattr(grams, "_TOGETHER", together)
    generator = torch.Generator().manual_seed(5)
    lengths = (3, 3, 7, 130, 130, 64, 3, 1)
    every = [
        OuterProducts(
            torch.randn(2, t, 6, generator=generator), torch.randn(2, t, 5, generator=generator)
        )
        for t in lengths
    ]
    for use, found in zip(every, outer_norms((use.left, use.right) for use in every), strict=True):
        exact = torch.stack(
            [use.example_gradient(i, torch.Size((6, 5))).square().sum() for i in range(2)]
        )
        torch.testing.assert_close(found.squared.double(), exact, rtol=1e-5, atol=0)
        alone = use.norms()
        torch.testing.assert_close(found.error, alone.error, rtol=1e-5, atol=0)
        torch.testing.assert_close(found.slack, alone.slack, rtol=1e-5, atol=0)
    assert outer_norms([]) == []


def test_remembered_products_with_weights_are_those_of_the_same_numbers():
    """A factor shared by several uses is scaled once, and again after a change in place."""
    factor = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(6))
    weights = Weights(torch.tensor([0.5, 2.0]))
    first = weights.scaled(factor, torch.float32)
    assert weights.scaled(factor, torch.float32) is first
    factor.mul_(3)
    torch.testing.assert_close(weights.scaled(factor, torch.float32), 3 * first)
    assert weights.scaled(factor, torch.float64).dtype == torch.float64
    torch.testing.assert_close(
        weights.scaled(factor.roll(1, 0), torch.float32)[1],
        4 * weights.scaled(factor, torch.float32)[0],
    )


# -- what a product over a physical batch rounds ---


def rounded_by_product(gradient, exact: torch.Tensor) -> float:
    """Return how far a sum over examples is from the exact one, in units of their slack."""
    total = torch.zeros(exact.shape, dtype=torch.float64)
    gradient.add_weighted_sum(total, Weights(torch.ones(len(gradient.slack()))))
    return float((total - exact).norm() / gradient.slack().sum())


@functools.cache
def worst_rounding() -> float:
    """Return the most of :func:`rounded_by_product` over terms of one size, whose rounding adds up,
    in products of several shapes, and terms that then cancel."""
    found = [0.0]
    for height, width in ((1, 1), (1, 64), (8, 16), (16, 16), (48, 64)):
        for examples, positions in ((16, 64), (4, 512), (16, 1024)):
            for value, signs in ((0.1, 1), (1 / 3, 1), (0.7, 1), (0.1, -1)):
                left = torch.ones(examples, positions, height)
                right = torch.full((examples, positions, width), value)
                right[:, positions // 2 :] *= signs
                exact = torch.einsum("btm,btn->mn", left.double(), right.double())
                found.append(rounded_by_product(OuterProducts(left, right), exact))
    for examples in (16, 256):
        rows = torch.full((examples, 300), 0.1)
        found.append(rounded_by_product(Dense(rows), rows.double().sum(0)))
    return max(found)


def test_a_product_over_a_batch_rounds_by_no_more_than_the_slack_of_its_examples():
    assert worst_rounding() <= 1


def test_planted_slack_of_a_sixteenth_is_seen():
    assert worst_rounding() * 16 > 1


def test_planted_sums_of_any_length_are_seen(monkeypatch):
    """Planted: thin products term by term in float32."""
    monkeypatch.setattr(gradients, "_THIN", 0)
    monkeypatch.setattr(gradients, "_TERMS", 2**30)
    assert worst_rounding.__wrapped__() > 1


def test_a_row_whose_positions_cancel_enters_with_little_weight():
    """What is left of it is rounding, which its neighbors help to decide."""
    torch.manual_seed(0)
    x, g = torch.randn(2, 1, 64, 32)
    x, g = torch.cat([x, x], 1), torch.cat([g, -g], 1)
    model = torch.nn.Linear(32, 32, bias=False)
    with ClippingEngine(model, 1e-3) as engine:
        engine.backward((model(x) * g).sum((1, 2)))
        assert float(engine.collect()["weight"].norm()) < 1e-3 * slack_cap(0)


@pytest.mark.parametrize("form", ["factors", "lookups", "summed", "summed last"])
def test_padding_does_not_change_a_slack(form):
    """A weight that it bounds would depend on the longest neighbor."""
    torch.manual_seed(0)
    g = torch.randn(2, 7, 8)

    def slack(padding):
        padded = F.pad(g, (0, 0, 0, padding))
        tokens = torch.arange(7 + padding).expand(2, -1)
        made = {
            "factors": lambda: OuterProducts(padded, torch.ones(2, 7 + padding, 3)),
            "lookups": lambda: Lookups(tokens, padded),
            "summed": lambda: summed(padded, torch.float32),
            "summed last": lambda: summed(padded.mT, torch.float32, 2),
        }
        return made[form]().slack()

    torch.testing.assert_close(slack(0), slack(500), rtol=1e-6, atol=0)


class Norm(torch.nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        layers = {
            "linear": lambda: torch.nn.Linear(64, 64),
            "layer norm": lambda: torch.nn.LayerNorm(64),
            "rms norm": lambda: torch.nn.RMSNorm(64),
        }
        self.layer = layers[kind]()
        for name, parameter in self.layer.named_parameters():
            parameter.requires_grad_(kind != "linear" or name == "bias")

    def forward(self, x):
        return self.layer(x)


def moved_by_padding(kind: str) -> float:
    """Return how far, in units of C, the sum over 15 rows whose positions cancel moves when a longer
    one joins them, so that they are padded on the left. Its own gradient is next to nothing."""
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(1, 32, 64, generator=generator) * 3e5
    g = torch.cat([half, -half[:, torch.randperm(32, generator=generator)]], 1)
    x = torch.ones(1, 64, 64) * torch.linspace(1, 2, 64)
    sums = []
    for longer in (0, 7):
        model, pad = Norm(kind), (0, 0, longer, 0)
        rows = [(torch.nn.functional.pad(x, pad, value=1.0), torch.nn.functional.pad(g, pad))] * 15
        if longer:
            rows.append((torch.randn(1, 71, 64), torch.full((1, 71, 64), 1e-9)))
        with ClippingEngine(model, 0.1) as engine:
            engine.regrouped = 16
            features, factors = (torch.cat(part) for part in zip(*rows, strict=True))
            engine.backward((model(features) * factors).sum((1, 2)))
            sums.append(torch.cat([total.flatten() for total in engine.collect().values()]))
    return float((sums[0] - sums[1]).norm()) / 0.1


@pytest.mark.parametrize("kind", ["linear", "layer norm", "rms norm"])
def test_padding_does_not_move_gradients_that_are_sums_over_positions(kind):
    assert moved_by_padding(kind) < 0.01


def test_planted_sums_over_positions_without_slack_are_seen(monkeypatch):
    rule = sys.modules["hf_dp.clipping.rules.affine"]
    monkeypatch.setattr(rule, "summed", lambda terms, dtype: Dense(terms.sum(1, dtype=dtype)))
    assert moved_by_padding("linear") > 1.01
