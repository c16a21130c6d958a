"""Flat, automatic and per-layer clipping: what they do to each example, and that none passes C."""

import math

import models
import pytest
import torch
from models import (
    SHORT,
    alone,
    assert_same_sums,
    batch_for,
    clip_losses,
    gradients_of,
    norm_of,
    rows,
    trained,
)
from torch import nn

from hf_dp.clipping import ClippingEngine, self_check
from hf_dp.clipping import norms as norms_module
from hf_dp.clipping.engine import STRATEGIES
from hf_dp.clipping.norms import AUTOMATIC_GAMMA, clipping_weights
from hf_dp.errors import SelfCheckError
from hf_dp.losses import per_example_loss
from hf_dp.plans.dp_sgd import CLIPPINGS


def layers_of(model: nn.Module) -> dict[str, int]:
    """Group by the module in a parameter's name; a tied one belongs to the first."""
    order: list[str] = []
    groups = {}
    for name, _ in model.named_parameters():
        owner = name.rpartition(".")[0]
        if owner not in order:
            order.append(owner)
        groups[name] = order.index(owner)
    return groups


def clipped(
    gradients: dict[str, torch.Tensor], model: nn.Module, clipping: str, c: float
) -> dict[str, torch.Tensor]:
    """One example's contribution, from its gradients, written out."""
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    if clipping == "automatic":
        return {name: g * c / (norm + 0.01) for name, g in gradients.items()}
    groups = layers_of(model)
    count = len(set(groups.values()))
    squares = [0.0] * count
    for name, gradient in gradients.items():
        squares[groups[name]] += float(gradient.square().sum())
    factors = [
        min(1.0, c / math.sqrt(count) / math.sqrt(square)) if square else 1.0 for square in squares
    ]
    return {name: gradient * factors[groups[name]] for name, gradient in gradients.items()}


@pytest.mark.parametrize("clipping", [c for c in CLIPPINGS if c != "flat"])
@pytest.mark.parametrize("name", ["gpt2_tied", "llama", "albert"])
def test_sums_equal_the_loop(name, clipping):
    model = models.BUILDERS[name]()
    batch = batch_for(model, SHORT)
    found = gradients_of(model, [alone(batch, i) for i in range(len(SHORT))])
    every = [{n: g for n, g in zip(trained(model), one) if g is not None} for one in found]
    norms = [math.sqrt(sum(float(g.square().sum()) for g in one.values())) for one in every]
    c = sorted(norms)[2]
    expected = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for one in every:
        for n, contribution in clipped(one, model, clipping, c).items():
            expected[n] += contribution
    for strategy in STRATEGIES:
        with ClippingEngine(model, c, clipping=clipping, strategy=strategy) as engine:
            found = engine.backward(per_example_loss(model, batch))
            assert_same_sums(engine.collect(), expected, atol=1e-9)
        exact = torch.tensor(norms, dtype=torch.float64)
        torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_no_example_adds_more_than_the_clipping_norm(clipping, scale):
    """Also where all its gradient is large, and whatever the losses' scale."""
    model = models.bert(dtype=torch.float32)
    batch = batch_for(model, SHORT)
    for one in (rows(batch, [i]) for i in range(len(SHORT))):
        with ClippingEngine(model, 0.1, clipping=clipping) as engine:
            engine.backward(per_example_loss(model, one) * scale)
            assert norm_of(engine.collect()) <= 0.1 * (1 + 1e-5)


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("groups", [1, 7])
def test_weights_keep_the_total_within_the_clipping_norm(clipping, groups):
    groups = groups if clipping == "per_layer" else 1
    generator = torch.Generator().manual_seed(0)
    norms = torch.randn(groups, 400, generator=generator, dtype=torch.float64).mul(6).exp()
    norms[:, 0] = 0
    weights = clipping_weights(clipping, norms, 0.3)
    assert bool(((weights * norms).square().sum(0).sqrt() <= 0.3 * (1 + 1e-12)).all())
    assert bool((weights > 0).all())


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_an_example_that_is_not_finite_in_one_group_has_no_weight_in_any(clipping, bad):
    norms = torch.ones(3 if clipping == "per_layer" else 1, 2)
    norms[-1, 1] = bad
    weights = clipping_weights(clipping, norms, 0.3)
    assert weights[:, 1].tolist() == [0.0] * len(norms) and bool((weights[:, 0] > 0).all())


def test_a_spoiled_layer_removes_the_example_from_all_layers():
    model = models.bert()
    batch, factors = batch_for(model, SHORT), torch.tensor([1, torch.inf, 1, 1])
    losses = lambda: per_example_loss(model, batch) * factors  # noqa: E731
    others = lambda: per_example_loss(model, rows(batch, [0, 2, 3]))  # noqa: E731
    norms, sums = clip_losses(model, losses, 0.1, clipping="per_layer")
    _, expected = clip_losses(model, others, 0.1, clipping="per_layer")
    assert_same_sums(sums, expected, atol=1e-12)
    assert torch.isinf(norms).tolist() == [False, True, False, False]


@pytest.mark.parametrize(("clipping", "strategy"), zip(CLIPPINGS, STRATEGIES, strict=True))
def test_the_self_check_knows_every_function(clipping, strategy):
    model = models.bert()
    batch = batch_for(model, (5, 9))
    singles = [alone(batch, 0), alone(batch, 1)]
    self_check(model, per_example_loss, batch, singles, clipping=clipping, strategy=strategy)


def test_planted_layers_clipped_to_the_whole_norm_are_seen(monkeypatch):
    """C for each layer instead of C / sqrt(K): a sensitivity of sqrt(K) C."""
    monkeypatch.setattr(norms_module.math, "sqrt", lambda x: 1.0)
    norms = torch.full((9, 1), 5.0)
    assert float((clipping_weights("per_layer", norms, 0.1) * norms).square().sum().sqrt()) > 0.29


def test_planted_missing_gamma_is_seen():
    norms = torch.tensor([[0.0, 0.1]])
    assert clipping_weights("automatic", norms, 1.0)[0].tolist() == pytest.approx(
        [100.0, 1 / (0.1 + AUTOMATIC_GAMMA)]
    )


def test_a_wrong_group_is_seen_by_the_self_check(monkeypatch):
    model = models.bert()
    batch = batch_for(model, (5, 9))
    original = ClippingEngine._group

    def one_apart(self):
        groups = original(self)
        last = list(groups)[-1]
        return groups | {last: groups[last] - 1}

    shown = ClippingEngine.groups.fget
    monkeypatch.setattr(ClippingEngine, "_group", one_apart)
    monkeypatch.setattr(
        ClippingEngine, "groups", property(lambda self: shown(self) | layers_of(model))
    )
    singles = [alone(batch, 0), alone(batch, 1)]
    with pytest.raises(SelfCheckError, match="clipped sum of .* differs"):
        self_check(model, per_example_loss, batch, singles, clipping="per_layer")
