"""One step's distribution is that of dp-accounting, point by point."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as google_pld
from dp_accounting.privacy_accountant import NeighboringRelation

from hf_dp.accounting import one_step


@functools.cache
def by_the_package(
    noise_multiplier: float, sample_rate: float, interval: float
) -> google_pld.PrivacyLossDistribution:
    return google_pld.from_gaussian_mechanism(
        noise_multiplier,
        sampling_prob=sample_rate,
        value_discretization_interval=interval,
        neighboring_relation=NeighboringRelation.REPLACE_SPECIAL,
    )


def largest_difference(noise_multiplier: float, sample_rate: float, interval: float) -> float:
    """Between ours and theirs, over all points of both directions and the infinite loss.

    In units of the rounding of a delta, which connect-the-dots divides by the interval.
    """
    ours = one_step.sampled_gaussian(noise_multiplier, sample_rate, interval)
    theirs = by_the_package(noise_multiplier, sample_rate, interval)
    found = []
    for pair in ((ours._pmf_remove, theirs._pmf_remove), (ours._pmf_add, theirs._pmf_add)):
        mine, other = (pmf.to_dense_pmf() for pmf in pair)
        assert mine._discretization == other._discretization == interval
        assert mine._pessimistic_estimate and other._pessimistic_estimate
        assert mine._lower_loss == other._lower_loss and mine.size == other.size
        found.append(np.abs(np.asarray(mine._probs) - np.asarray(other._probs)).max())
        found.append(abs(mine._infinity_mass - other._infinity_mass))
    assert ours._symmetric is theirs._symmetric is False
    return float(max(found)) / (np.finfo(float).eps / interval)


ROUNDINGS = 4
CASES = [
    (1.0, 0.2, 1e-4),
    (0.3, 1e-5, 1e-4),
    (0.3, 0.999, 1e-3),
    (0.6, 0.01, 1e-3),
    (1.0, 0.5, 1e-3),
    (2.0, 0.002, 1e-5),
    (100.0, 0.3, 1e-5),
    (100.0, 1e-5, 1e-5),
]


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_packages_distribution(case):
    assert largest_difference(*case) < ROUNDINGS


@pytest.mark.parametrize("case", CASES[:5])
@pytest.mark.parametrize("planted", ["rate", "shift"])
def test_planted_errors_are_seen(case, planted, monkeypatch):
    original = one_step._deltas

    def wrong(step, epsilons):
        if planted == "shift":
            return original(step, epsilons + 1e-6)
        other = one_step.GaussianPrivacyLoss(
            step.standard_deviation,
            sampling_prob=step.sampling_prob * (1 - 1e-6),
            adjacency_type=step.adjacency_type,
        )
        return original(other, epsilons)

    monkeypatch.setattr(one_step, "_deltas", wrong)
    assert largest_difference(*case) > 100 * ROUNDINGS


def test_a_grid_point_at_the_end_of_the_losses():
    """Where an example's step has lost its least possible loss, log(1 - q), or rounds to it."""
    rate = -np.expm1(-0.5)
    for adjacency in (one_step.AdjacencyType.REMOVE, one_step.AdjacencyType.ADD):
        step = one_step.GaussianPrivacyLoss(1.0, sampling_prob=rate, adjacency_type=adjacency)
        end = np.log1p(-rate) * (1 if adjacency == one_step.AdjacencyType.REMOVE else -1)
        near = np.array([end, np.nextafter(end, -1), np.nextafter(end, 1), end * (1 - 1e-13)])
        expected = [float(step.get_delta_for_epsilon(float(epsilon))) for epsilon in near]
        np.testing.assert_allclose(one_step._deltas(step, near), expected, rtol=0, atol=1e-12)
