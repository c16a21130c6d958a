"""Partition gradient magnitudes against definitions 7 to 9 in float64, their sensitivity by leaving
each record out."""

import math
from functools import cache

import pytest
import torch
from models import ARCHITECTURES, INFILLING, collate, single, together

from hf_dp.errors import InvalidArgumentError
from hf_dp.plans.rounding import slack_cap
from hf_dp.tuners.frost.magnitude import MAGNITUDES, MagnitudeEngine, sensitivity
from hf_dp.tuners.frost.select import partitions

KINDS = [(magnitude, order) for magnitude in MAGNITUDES for order in (1, 2)]
LENGTHS = (5, 1, 3, 6)
NAMES = ("bert", "gpt2_tied", "vit", "t5", "infilling")


def gradients(architecture, model, examples):
    """For each example its gradient by parameter name, one backward pass each, plain autograd."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = []
    with architecture.precision():
        for example in examples:
            found = torch.autograd.grad(
                single(model, example), list(named.values()), allow_unused=True
            )
            rows.append(
                {
                    n: torch.zeros_like(p) if g is None else g
                    for (n, p), g in zip(named.items(), found, strict=True)
                }
            )
    return rows


def on_parts(row, parts):
    """The gradient on each partition, as a vector."""
    return [torch.cat([row[name].double().flatten() for name in part.parameters]) for part in parts]


def by_the_text(rows, parts, c, magnitude, order):
    """Definitions 3, 6, 7 and 8, vector by vector."""

    def norm(vector):
        return vector.abs().sum() if order == 1 else vector.square().sum().sqrt()

    def clip(vector, threshold):
        return vector * min(1.0, threshold / float(norm(vector))) if float(norm(vector)) else vector

    sizes = [part.size for part in parts]
    sums = [torch.zeros(size, dtype=torch.float64) for size in sizes]
    for row in rows:
        on = on_parts(row, parts)
        if magnitude == "mg":
            clipped = clip(torch.cat(on), c)
        else:
            scaled = [g / size ** (1 / order) for g, size in zip(on, sizes, strict=True)]
            normalized = torch.cat(scaled)
            normalized = normalized.abs() if magnitude == "mgna" else normalized
            clipped = clip(normalized, c / (sum(sizes) / len(sizes)) ** (1 / order))
        for total, piece in zip(sums, clipped.split(sizes), strict=True):
            total += piece
    scale = [size ** (1 / order) if magnitude == "mg" else 1.0 for size in sizes]
    return torch.tensor(
        [float(norm(total)) / s for total, s in zip(sums, scale, strict=True)], dtype=torch.float64
    )


def measured(architecture, model, examples, parts, c, magnitude, order, cuts=((0, 4),)):
    with MagnitudeEngine(model, parts, c, magnitude, order) as engine, architecture.precision():
        for start, stop in cuts:
            if examples[start:stop]:
                engine.backward(together(model, collate(model, examples[start:stop])))
        return engine.magnitudes().double(), sensitivity(parts, magnitude, order, c)


def middle(rows, parts, magnitude, order):
    """A threshold c at which some examples are clipped and some are not."""
    sizes = [1.0 if magnitude == "mg" else part.size for part in parts]
    norms = []
    for row in rows:
        power = sum(
            float(g.abs().pow(order).sum()) / size
            for g, size in zip(on_parts(row, parts), sizes, strict=True)
        )
        norms.append(power ** (1 / order))
    return sorted(norms)[len(norms) // 2] * 0.99 * (sum(sizes) / len(sizes)) ** (1 / order)


@cache
def setting(name):
    """An architecture, its model, the partitions, examples and their gradients."""
    architecture = INFILLING["bert"] if name == "infilling" else ARCHITECTURES[name]
    model = architecture.build()
    examples = architecture.examples(model, LENGTHS)
    return (
        architecture, model, partitions(model), examples, gradients(architecture, model, examples),
    )  # fmt: skip


# All kinds on one model, and each other model with the paper's choice and with one that looks twice.
CASES = [("bert", *kind) for kind in KINDS] + [
    (name, *kind) for name in NAMES[1:] for kind in (("mgna", 1), ("mg", 2))
]


@pytest.mark.parametrize(("name", "magnitude", "order"), CASES)
def test_equals_the_definitions(name, magnitude, order):
    architecture, model, parts, examples, rows = setting(name)
    c = middle(rows, parts, magnitude, order)
    expected = by_the_text(rows, parts, c, magnitude, order)
    for cuts in (((0, 4),), ((0, 1), (1, 4))):
        found, _ = measured(architecture, model, examples, parts, c, magnitude, order, cuts)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("magnitude", "order"), KINDS)
def test_leaving_any_record_out_moves_it_by_less_than_lemma_3(magnitude, order):
    architecture, model, parts, examples, rows = setting("bert")
    how = (parts, middle(rows, parts, magnitude, order), magnitude, order)
    everyone, bound = measured(architecture, model, examples, *how)
    for left_out in range(len(examples)):
        rest = examples[:left_out] + examples[left_out + 1 :]
        without, _ = measured(architecture, model, rest, *how)
        assert float((everyone - without).norm()) <= bound


@pytest.mark.parametrize(("magnitude", "order"), KINDS)
def test_the_bound_is_reached(magnitude, order):
    """A record whose gradient lies on one partition, the smallest for mg: noise for a smaller bound
    would not do."""
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 1, bias=False)
    ).double()
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[1e-9, 1e-9, 1e-9]]))
    parts = partitions(model)
    with MagnitudeEngine(model, parts, 0.1, magnitude, order) as engine:
        engine.backward(1e6 * model(torch.ones(1, 3, dtype=torch.float64))[:, 0])
        moved = float(engine.magnitudes().norm())
    bound = sensitivity(parts, magnitude, order, 0.1)
    assert 0.99 * bound <= moved <= bound


def test_sensitivities_are_those_of_lemma_3():
    parts = partitions(
        torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 1, bias=False))
    )
    for magnitude, order in KINDS:
        size = 4 if magnitude == "mg" else 10  # the smallest, or the mean
        expected = pytest.approx(2.0 / size ** (1 / order), rel=1e-3)
        assert sensitivity(parts, magnitude, order, 2.0) == expected


@pytest.mark.parametrize(("magnitude", "order"), KINDS)
def test_a_record_that_is_not_finite_is_left_out(magnitude, order):
    model = torch.nn.Linear(3, 2).double()
    parts = partitions(model)
    x = torch.tensor([[1.0, 2.0, 3.0], [math.inf, 1.0, 1.0], [0.5, 0.1, -2.0]], dtype=torch.float64)
    found = []
    for rows in (x, x[[0, 2]]):
        with MagnitudeEngine(model, parts, 0.1, magnitude, order) as engine:
            engine.backward(model(rows).square().sum(1))
            found.append(engine.magnitudes())
    assert torch.isfinite(found[0]).all()
    torch.testing.assert_close(found[0], found[1])


def test_parameters_outside_the_partitions_must_be_frozen():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    parts = partitions(model)
    with pytest.raises(InvalidArgumentError, match=r"'1\.weight'.*Freeze"):
        MagnitudeEngine(model, parts[:1], 0.1).__enter__()
    assert "forward" not in model[0].__dict__, "left as it was"
    model[1].requires_grad_(False)
    with MagnitudeEngine(model, parts[:1], 0.1) as engine:
        engine.backward(model(torch.randn(2, 3))[:, 0])
        assert engine.magnitudes().shape == (1,)
    for options in ({"magnitude": "mgx"}, {"norm_order": 3}, {"clipping_norm": 0}):
        with pytest.raises(InvalidArgumentError):
            MagnitudeEngine(model, parts[:1], **{"clipping_norm": 0.1, **options})


@pytest.mark.parametrize(("magnitude", "order"), [("mg", 1), ("mgn", 1), ("mgna", 2)])
def test_one_record_beside_very_many_alike_moves_it_no_further(magnitude, order):
    """Float32 totals of 20,000 equal records would round the last one's part by more than the
    margin allows for."""
    model = torch.nn.Linear(2, 3, bias=False)
    parts = partitions(model)

    def after(examples):
        with MagnitudeEngine(model, parts, 0.1, magnitude, order) as engine:
            engine.backward(model(torch.ones(1, 2)).sum(1))
            (total,) = engine._totals.values()
            total.mul_(examples)
            engine.backward(model(torch.ones(1, 2)).sum(1))
            return engine.magnitudes(), sensitivity(parts, magnitude, order, 0.1), total.dtype

    (more, bound, dtype), (fewer, _, _) = after(4_000_001), after(4_000_000)
    assert dtype == torch.float64
    assert float((more - fewer).norm()) <= bound


def of_a_row_that_cancels(kind, magnitude, order):
    """Return what a record adds whose true gradient is 0, in units of the sensitivity."""
    torch.manual_seed(0)
    g = torch.randn(1, 64, 32)
    g = torch.cat([g, -g.flip(1)], 1)
    if kind == "lookups":
        model = torch.nn.Embedding(5, 32)
        x = torch.zeros(1, 128, dtype=torch.long)
    else:
        model = torch.nn.Linear(32, 32, bias=False)
        x = torch.randn(1, 64, 32)
        x = torch.cat([x, x.flip(1)], 1)
    parts = partitions(model)
    with MagnitudeEngine(model, parts, 1e-4, magnitude, order) as engine:
        engine.backward((model(x) * g).sum((1, 2)))
        return float(engine.magnitudes().norm()) / sensitivity(parts, magnitude, order, 1e-4)


@pytest.mark.parametrize("kind", ["factors", "lookups"])
@pytest.mark.parametrize(("magnitude", "order"), KINDS)
def test_what_rounding_left_of_a_record_enters_with_little_weight(kind, magnitude, order):
    """Its neighbors help to decide it, and each that regroups would move the sum by the bound."""
    assert of_a_row_that_cancels(kind, magnitude, order) <= slack_cap(0)


def test_planted_magnitudes_without_slack_are_seen(monkeypatch):
    monkeypatch.setattr(MagnitudeEngine, "_slack", lambda self, p, uses: torch.zeros(1).double())
    found = [of_a_row_that_cancels("factors", *kind) for kind in KINDS]
    assert min(found) > 100 * slack_cap(0)
