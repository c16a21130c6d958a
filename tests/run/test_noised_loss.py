"""The sum of losses that a step releases: what one example can do to it, and its noise. That it is
recorded before it leaves, and leaves once, is the gate's (test_gate.py).

Each property has the bug it guards against planted.
"""

import math
from pathlib import Path

import loops
import pytest
import tiny
import torch
from loops import plan, run
from scipy import stats

from hf_dp import NoisedLoss, PrivateRun, mechanism_for, save_run
from hf_dp.errors import SelfCheckError
from hf_dp.losses import per_example_loss
from hf_dp.mechanisms.dp_sgd import BoundedLosses
from hf_dp.plans.mechanism import PlannedRelease
from hf_dp.statement.evidence import disagreements, read

BOUND, RATIO, ROWS, BATCH = 0.75, 0.2, 40, 8
EXTREMES = [math.nan, math.inf, -math.inf, -5.0, 1e30, 0.3, 0.7, BOUND]


def extreme_loss(model, inputs):
    """Losses that can be anything, each of its example alone."""
    losses = per_example_loss(model, inputs)
    factors = torch.tensor(EXTREMES)[inputs["input_ids"].sum(1) % len(EXTREMES)]
    return losses * factors


def private_run(folder: Path, steps: int = 4, loss=None) -> PrivateRun:
    planned = plan(loss=NoisedLoss(BOUND, RATIO), max_steps=steps)
    return run(folder, planned, size=8, compute_per_example_loss=loss)


# -- sensitivity --


def moves_by_at_most_the_bound(folder: Path) -> bool:
    """Whether each example moves what a step hands to the release by at most B, in any draw."""
    mechanism = mechanism_for(private_run(folder, loss=extreme_loss))

    def total(indices: list[int]) -> float:
        return float(mechanism.clip(loops.batches_of(mechanism, indices)).beside["loss"])

    others = [1, 5, 6, 12, 14, 15, 17]
    alone, moved = total(others), []
    for index in range(18, ROWS):
        moved.append(abs(total([*others, index]) - alone))
    assert total([]) == 0.0
    return all(move <= BOUND for move in moved) and max(moved) > 0.9 * BOUND


@pytest.mark.usefixtures("unchecked")
def test_one_example_moves_the_sum_by_at_most_the_bound(tmp_path):
    seen = {sum(row["input_ids"]) % len(EXTREMES) for row in tiny.dataset().select(range(18, ROWS))}
    assert len(seen) > 5  # the rows meet the extremes
    assert moves_by_at_most_the_bound(tmp_path)


def _unclipped(self, losses):
    self.total += losses.double().nan_to_num(0, 0, 0).sum()


def _not_finite(self, losses):
    self.total += losses.double().clamp(0, self.bound).sum()


def _negative(self, losses):
    values = losses.double()
    self.total += torch.where(values.isfinite(), values, 0).clamp(max=self.bound).sum()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("planted", [_unclipped, _not_finite, _negative])
def test_planted_losses_that_are_not_bounded_are_seen(planted, tmp_path, monkeypatch):
    monkeypatch.setattr(BoundedLosses, "add", planted)
    assert not moves_by_at_most_the_bound(tmp_path)


def totals_of_parts(unit: float, bound: float = 0.3) -> set[float]:
    """The totals of 30,000 losses, in other orders and other parts, as processes would form them."""
    losses = torch.rand(30_000, generator=torch.Generator().manual_seed(0)) / 2
    found = set()
    for seed, sizes in enumerate(([30_000], [1] * 300 + [29_700], [7_500] * 4)):
        order = torch.randperm(len(losses), generator=torch.Generator().manual_seed(seed))
        parts = []
        for part in losses[order].split(sizes):
            own = BoundedLosses(bound, unit, torch.device("cpu"))
            own.add(part)
            parts.append(own.total)
        found.add(float(sum(parts)))
    return found


def test_the_sum_is_exact_in_whatever_order_and_parts():
    loss = NoisedLoss(0.3, 0.1)
    unit = loss.unit(plan(30_000, loss, expected_batch_size=100, max_steps=1))
    assert len(totals_of_parts(unit)) == 1
    assert len(totals_of_parts(2.0**-60)) > 1  # planted: a sum that is rounded


def test_what_is_clipped():
    losses = BoundedLosses(0.75, 2.0**-40, torch.device("cpu"))
    losses.add(torch.tensor([math.nan, math.inf, -math.inf, -1.0, 0.0]))
    assert float(losses.total) == 0.0
    losses.add(torch.tensor([5.0, 0.75, 0.5, 1e38]))
    losses.add(torch.tensor([0.25], dtype=torch.float64, requires_grad=True))
    losses.add(torch.tensor([0.25], dtype=torch.bfloat16))
    losses.add(torch.zeros(0))
    assert float(losses.total) == 3 * 0.75 + 0.5 + 0.25 + 0.25
    assert losses.total.dtype == torch.float64 and not losses.total.requires_grad


@pytest.mark.parametrize("through", ["value", "gradient"])
def test_a_loss_that_depends_on_its_neighbors_is_refused(through, tmp_path):
    """Also where only its value does, which moves no gradient."""

    def coupled(model, inputs):
        losses = per_example_loss(model, inputs)
        return losses + len(losses) if through == "value" else losses * len(losses)

    mechanism = mechanism_for(private_run(tmp_path, loss=coupled))
    with pytest.raises(SelfCheckError, match="loss of a synthetic example"):
        next(iter(mechanism.logical_batches()))
    assert not (tmp_path / "ledger.jsonl").exists()


# -- what is released --


def pvalue_of_the_noise(folder: Path, steps: int = 120) -> float:
    """KS test of the noised losses of empty draws, from the public numbers alone."""
    private = private_run(folder, steps)
    private.randomness = loops.EmptyDraws()
    mechanism, found = mechanism_for(private), []
    for clipped in loops.steps(mechanism):
        assert float(clipped.loss_sum) == 0  # nobody is drawn
        found.append(float(mechanism.noised["noised_loss"]))
    std = math.sqrt((1 - RATIO) / RATIO) * 1.0 * BOUND / BATCH
    assert len(set(found)) == steps
    return stats.kstest([value / std for value in found], "norm").pvalue


@pytest.mark.usefixtures("unchecked")
def test_the_noise_has_the_documented_standard_deviation(tmp_path):
    assert pvalue_of_the_noise(tmp_path) > 1e-7


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("part", ["sum", "loss"])
def test_planted_noise_of_another_size_is_seen_where_it_is_used(tmp_path, monkeypatch, part):
    honest = PlannedRelease.noise_std

    def planted(self, name):
        return honest(self, name) * (0.2 if name == part else 1)

    monkeypatch.setattr(PlannedRelease, "noise_std", planted)
    assert (pvalue_of_the_noise(tmp_path) < 1e-7) == (part == "loss")


@pytest.mark.usefixtures("without_noise")
def test_it_is_the_clipped_mean_and_noise(tmp_path):
    """With the noise set aside: of exactly the rows of the draw, by the expected batch size."""
    private = private_run(tmp_path)
    mechanism = mechanism_for(private)
    optimizer = torch.optim.SGD(private.model.parameters(), lr=0.5)
    found = []
    for batches in mechanism.logical_batches():
        batches = list(batches)
        with torch.no_grad():
            losses = [per_example_loss(private.model, dict(batch)) for batch in batches]
        expected = float(sum(each.double().clamp(0, BOUND).sum() for each in losses)) / BATCH
        loops.step(mechanism, batches)
        found.append((float(mechanism.noised["noised_loss"]), expected))
        optimizer.step()
        optimizer.zero_grad()
    assert len(found) == 4 and any(expected > 0 for _, expected in found)
    for got, expected in found:
        assert got == pytest.approx(expected, abs=1e-5)
    statement = save_run(mechanism)
    assert disagreements(read(tmp_path)) == []
    assert [row["type"] for row in statement.ledger.to_list()] == ["PoissonSampledGaussian"]
