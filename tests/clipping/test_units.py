"""Users of several rows, clipped once, against a float64 loop over users.

The loop adds up the gradients of a user's rows, each alone and unpadded, and clips the sum.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from forms import FORMS, force
from models import (
    ARCHITECTURES,
    EACH_RULE,
    assert_equal,
    built,
    clip,
    collate,
    gpt2,
    gradients_of,
    llama,
    norm_of,
    together,
    trained,
)
from torch import nn

from hf_dp.clipping import ClippingEngine, chunked_loss, gradients
from hf_dp.clipping.engine import STRATEGIES
from hf_dp.clipping.partial_gradients import Carriers, LowRankEngine, MaskedEngine
from hf_dp.clipping.rounding import Norms
from hf_dp.errors import InvalidArgumentError, UnaccountedGradientError, UnsupportedModelError
from hf_dp.losses import per_example_loss
from hf_dp.tuners.frost.magnitude import MagnitudeEngine
from hf_dp.tuners.frost.select import partitions

SHORT, LONG = (5, 1, 3, 6, 2, 4), (19, 1, 8, 12)


def summed(rows, scale=1.0):
    """The gradients of one user."""
    used = ([each for each in column if each is not None] for column in zip(*rows, strict=True))
    return [sum(scale * each for each in column) if column else None for column in used]


def of_users(architecture, model, examples, sizes: Sequence[int], mean: bool = False):
    with architecture.precision():
        rows = iter(gradients_of(model, examples))
    users = [summed([next(rows) for _ in range(size)], 1 / size if mean else 1.0) for size in sizes]
    return clip(trained(model), users)


def found_by(engine, architecture, model, examples, rows):
    with engine, architecture.precision():
        losses = together(model, collate(model, examples))
        norms = engine.backward(losses / rows, rows_per_unit=rows)
        return norms, engine.collect()


def slow(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize(
    "name", [*EACH_RULE, *slow(name for name in ARCHITECTURES if name not in EACH_RULE)]
)
def test_users_of_two_rows_equal_the_loop(name):
    architecture, model, examples = built(name, SHORT)
    expected = of_users(architecture, model, examples, (2, 2, 2), mean=True)
    engine = ClippingEngine(model, expected.clipping_norm)
    assert_equal(*found_by(engine, architecture, model, examples, 2), expected)


@pytest.mark.parametrize("lengths", [SHORT[:4], LONG], ids=["short", "long"])
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("name", ["bert", "gpt2_tied"])
def test_every_strategy(name, rows, lengths):
    architecture, model, examples = built(name, lengths)
    expected = of_users(architecture, model, examples, [rows] * (4 // rows), mean=True)
    for strategy in STRATEGIES:
        engine = ClippingEngine(model, expected.clipping_norm, strategy=strategy)
        assert_equal(*found_by(engine, architecture, model, examples, rows), expected)


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form, monkeypatch):
    force(form, monkeypatch)
    architecture, model, examples = built("gpt2_tied", LONG)
    expected = of_users(architecture, model, examples, (2, 2), mean=True)
    engine = ClippingEngine(model, expected.clipping_norm)
    assert_equal(*found_by(engine, architecture, model, examples, 2), expected)


def in_parts(engine, architecture, model, parts):
    """Feed one user's rows in several calls, then another's in one."""
    norms = []
    with engine, architecture.precision():
        for rows, continues in parts:
            losses = together(model, collate(model, rows))
            norms.append(engine.backward(losses, rows_per_unit=len(rows), unit_continues=continues))
        return torch.cat(norms), engine.collect()


@pytest.mark.parametrize("name", ["gpt2_tied", "vit", *slow(["bert", "t5"])])
def test_a_user_in_several_physical_batches_is_clipped_once(name):
    architecture, model, examples = built(name, SHORT)
    expected = of_users(architecture, model, examples, (4, 2))
    parts = [(examples[:2], True), (examples[2:3], True), (examples[3:4], False)]
    for strategy in STRATEGIES:
        engine = ClippingEngine(model, expected.clipping_norm, strategy=strategy)
        found = in_parts(engine, architecture, model, [*parts, (examples[4:], False)])
        assert_equal(*found, expected)


def test_planted_a_user_clipped_in_each_part_is_seen():
    architecture, model, examples = built("bert", (4, 4))
    expected = of_users(architecture, model, examples, (2,))
    engine = ClippingEngine(model, 0.5 * expected.clipping_norm)
    parts = [(examples[:1], False), (examples[1:], False)]
    _, sums = in_parts(engine, architecture, model, parts)
    assert norm_of(sums) > 1.2 * engine.clipping_norm


def test_planted_products_between_rows_left_out_are_seen(monkeypatch):
    """Planted: norms as if the rows of a user were orthogonal."""
    honest = gradients.OuterProducts.norms

    def by_rows(self, grams=None):
        pairs = zip(self.left.chunk(2, 1), self.right.chunk(2, 1), strict=True)
        parts = [vars(honest(gradients.OuterProducts(*pair))).values() for pair in pairs]
        return Norms(*(one + other for one, other in zip(*parts, strict=True)))

    architecture, model, examples = built("bert", (4, 4))
    expected = of_users(architecture, model, examples, (2,), mean=True)
    monkeypatch.setattr(gradients.OuterProducts, "norms", by_rows)
    monkeypatch.setattr("hf_dp.clipping.norms.outer_norms", lambda pairs, grams: [
        by_rows(gradients.OuterProducts(*pair)) for pair in pairs
    ])  # fmt: skip
    engine = ClippingEngine(model, expected.clipping_norm)
    norms, _ = found_by(engine, architecture, model, examples, 2)
    assert abs(float(norms[0] / expected.norms[0]) - 1) > 1e-3


@pytest.mark.parametrize("clipping", ["automatic", "per_layer"])
def test_other_clipping_functions_bound_users(clipping):
    architecture, model, examples = built("bert", SHORT)
    engine = ClippingEngine(model, 1e-3, clipping=clipping)
    for first in (0, 3):
        _, sums = found_by(engine, architecture, model, examples[first : first + 3], 3)
        assert 0.5e-3 < norm_of(sums) <= 1e-3 * (1 + 1e-9)


@pytest.mark.parametrize("lengths", [LONG, (5, 3, 2, 4)], ids=["explicit", "by blocks"])
@pytest.mark.parametrize("build", [gpt2, llama], ids=["tied", "untied"])
def test_the_loss_by_blocks(build, lengths, monkeypatch):
    monkeypatch.setattr(chunked_loss, "_WIDTH", 9)
    model = build()
    architecture = ARCHITECTURES["gpt2_tied"]
    examples = architecture.examples(model, lengths)
    expected = of_users(architecture, model, examples, (2, 2))
    with ClippingEngine(model, expected.clipping_norm) as engine:
        losses = per_example_loss(model, collate(model, examples), True)
        norms = engine.backward(losses, rows_per_unit=2)
        sums = engine.collect()
    assert_equal(norms, sums, expected)
    with ClippingEngine(model, expected.clipping_norm) as engine:
        norms = []
        for first, continues in ((0, True), (1, False), (2, True), (3, False)):
            losses = per_example_loss(model, collate(model, examples[first : first + 1]), True)
            norms.append(engine.backward(losses, rows_per_unit=1, unit_continues=continues))
        assert_equal(torch.cat(norms), engine.collect(), expected)


def test_masked_entries():
    architecture = ARCHITECTURES["bert"]
    model = architecture.build()
    generator = torch.Generator().manual_seed(0)
    weights = {name: p for name, p in model.named_parameters() if p.dim() == 2}
    masks = {name: torch.rand(p.shape, generator=generator) < 0.3 for name, p in weights.items()}
    examples = architecture.examples(model, SHORT[:4])
    with architecture.precision():
        rows = gradients_of(model, examples)

    def kept(user):
        pairs = zip(trained(model), user, strict=True)
        return [g if g is None or n not in masks else g * masks[n] for n, g in pairs]

    expected = clip(trained(model), [kept(summed(rows[:2])), kept(summed(rows[2:]))])
    engine = MaskedEngine(model, masks, expected.clipping_norm)
    with engine, architecture.precision():
        norms = engine.backward(together(model, collate(model, examples)), rows_per_unit=2)
        assert_equal(norms, engine.collect(), expected)


def test_low_rank_carriers():
    torch.manual_seed(0)
    model, x = nn.Linear(6, 5, bias=False).double(), torch.randn(4, 3, 6).double()
    carriers = Carriers(torch.randn(5, 2).double(), torch.randn(2, 6).double())
    with LowRankEngine(model, {"weight": carriers}, 0.1) as engine:
        norms = engine.backward(torch.sin(model(x)).sum((1, 2)), rows_per_unit=2)
    for user in (0, 1):
        (whole,) = torch.autograd.grad(torch.sin(model(x[2 * user :][:2])).sum(), model.weight)
        parts = torch.cat(
            [(whole @ carriers.right.mT).flatten(), (carriers.left.mT @ whole).flatten()]
        )
        torch.testing.assert_close(norms[user], parts.norm().detach())


@pytest.mark.parametrize("parts", [False, True])
def test_magnitudes_of_partitions(parts):
    """DP-FROST, definition 8 with mgna and order 1: mu_P = sum_x w_x |g_P(x)|_1 / |P|, x a user."""
    architecture, model, examples = built("bert", SHORT[:4])
    chosen = partitions(model)
    for name, p in model.named_parameters():
        p.requires_grad_(any(name in part.parameters for part in chosen))
    with architecture.precision():
        rows = gradients_of(model, examples)
    engine = MagnitudeEngine(model, chosen, clipping_norm=0.5)
    threshold = 0.5 / (sum(part.size for part in chosen) / len(chosen))
    expected = torch.zeros(len(chosen), dtype=torch.float64)
    for user in (summed(rows[:2]), summed(rows[2:])):
        sizes = {
            n: g.abs().sum() for n, g in zip(trained(model), user, strict=True) if g is not None
        }
        totals = [sum(sizes.get(name, 0.0) for name in part.parameters) for part in chosen]
        shares = torch.stack([total / p.size for total, p in zip(totals, chosen, strict=True)])
        expected += shares * min(1.0, threshold / float(shares.sum()))
    with engine, architecture.precision():
        if parts:
            calls = [(examples[:1], 1, True), (examples[1:2], 1, False), (examples[2:], 2, False)]
        else:
            calls = [(examples, 2, False)]
        for some, per_unit, continues in calls:
            losses = together(model, collate(model, some))
            engine.backward(losses, rows_per_unit=per_unit, unit_continues=continues)
        torch.testing.assert_close(engine.magnitudes(), expected, rtol=1e-6, atol=0)


def test_a_user_with_a_row_that_is_not_finite_is_left_out():
    architecture, model, examples = built("bert", SHORT[:4])
    with ClippingEngine(model, 1.0) as engine, architecture.precision():
        losses = together(model, collate(model, examples))
        scale = torch.tensor([1.0, torch.inf, 1.0, 1.0], dtype=losses.dtype)
        norms = engine.backward(losses * scale, rows_per_unit=2)
        left_out = engine.collect()
        engine.backward(together(model, collate(model, examples[2:])), rows_per_unit=2)
        alone = engine.collect()
    assert torch.isinf(norms[0]) and torch.isfinite(norms[1])
    for name, total in alone.items():
        torch.testing.assert_close(left_out[name], total)


def test_bf16_units_are_summed_in_float64():
    torch.manual_seed(0)
    model = nn.Linear(8, 4).to(torch.bfloat16)
    with ClippingEngine(model, 1.0) as engine:
        engine.backward(model(torch.randn(6, 8).bfloat16()).float().sum(1), rows_per_unit=3)
        assert {s.dtype for s in engine.collect().values()} == {torch.float64}


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def test_rows_that_are_no_whole_users_are_refused(linear):
    with ClippingEngine(linear, 1.0) as engine:
        losses = linear(torch.randn(5, 3)).sum(1)
        with pytest.raises(InvalidArgumentError, match="`rows_per_unit` to divide the 5 examples"):
            engine.backward(losses, rows_per_unit=2)
        with pytest.raises(InvalidArgumentError, match="whole number >= 1"):
            engine.backward(losses, rows_per_unit=0)
        with pytest.raises(InvalidArgumentError, match="to be the number of examples, 5"):
            engine.backward(losses, rows_per_unit=1, unit_continues=True)


def test_a_user_whose_rows_do_not_end_is_refused(linear):
    with ClippingEngine(linear, 1.0) as engine:
        engine.backward(linear(torch.randn(2, 3)).sum(1), rows_per_unit=2, unit_continues=True)
        with pytest.raises(UnaccountedGradientError, match="unit_continues=False"):
            engine.collect()
        with pytest.raises(InvalidArgumentError, match="to be the number of examples, 4"):
            engine.backward(linear(torch.randn(4, 3)).sum(1), rows_per_unit=2)
        engine.backward(linear(torch.randn(1, 3)).sum(1), rows_per_unit=1)
        assert norm_of(engine.collect()) <= 1.0 + 1e-6


def test_a_failure_within_a_user_spoils_the_sums(linear):
    with ClippingEngine(linear, 1.0) as engine:
        engine.backward(linear(torch.randn(2, 3)).sum(1), rows_per_unit=2, unit_continues=True)
        linear.weight.grad = torch.zeros_like(linear.weight)
        with pytest.raises(UnaccountedGradientError, match="zero_grad"):
            engine.backward(linear(torch.randn(1, 3)).sum(1), rows_per_unit=1)


def test_a_form_that_cannot_be_joined_is_refused():
    class Other(gradients.Dense):
        of_units = gradients.PerExampleGradient.of_units

    with pytest.raises(UnsupportedModelError, match="Other cannot be summed"):
        Other(torch.zeros(2, 3)).of_units(2)
