"""What is computed for all orders or points at once is what dp-accounting computes one by one."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as google_pld
from dp_accounting.rdp import rdp_privacy_accountant as google_rdp

from hf_dp.accounting import grid, one_step, sampled_curve
from hf_dp.accounting.rdp import ORDERS, RANGE

# (noise multiplier, sample rate); the last leaves out orders whose series do not converge
CURVES = [
    (1.0, 0.01),
    (0.3, 1e-5),
    (0.3, 0.999),
    (100.0, 0.3),
    (RANGE.min_noise_multiplier, 0.5),
    (RANGE.max_noise_multiplier, RANGE.min_sample_rate),
    (30.0, 0.5),
]


def largest_difference(sigma: float, rate: float) -> float:
    """Between the logarithms of our moments and theirs, relative where they are large; infinity
    where only one of the two converges."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # of series that do not converge
    ours = sampled_curve.log_moments(sigma, rate, ORDERS)
    theirs = np.array([google_rdp._compute_log_a(rate, sigma, order) for order in ORDERS])
    finite = np.isfinite(theirs)
    if (np.isfinite(ours) != finite).any():
        return math.inf
    ours, theirs = ours[finite], theirs[finite]
    return float((np.abs(ours - theirs) / np.maximum(1.0, np.abs(theirs))).max())


@pytest.mark.parametrize(("sigma", "rate"), CURVES)
def test_the_moments_of_a_step(sigma, rate):
    assert largest_difference(sigma, rate) < 1e-14


def test_series_that_do_not_converge_are_left_out():
    found = sampled_curve.log_moments(*CURVES[-1], ORDERS)
    assert {order for order, moment in zip(ORDERS, found) if math.isinf(moment)} < {
        order for order in ORDERS if not order.is_integer()
    }
    assert np.isinf(found).any()


@pytest.mark.parametrize(("name", "wrong"), [("_NEGLIGIBLE", 10.0), ("MOST_TERMS", 10)])
def test_planted_errors_of_the_moments_are_seen(name, wrong, monkeypatch):
    monkeypatch.setattr(sampled_curve, "_BLOCK", 10)
    assert largest_difference(1.0, 0.5) < 1e-14
    monkeypatch.setattr(sampled_curve, name, wrong)
    assert largest_difference(1.0, 0.5) > 1e-9


# (noise multiplier, sample rate, steps, interval)
COMPOSED = [
    (1.0, 0.2, 4, 1e-3),
    (0.3, 1e-5, 10_000, 1e-3),
    (0.8, 0.0152, 198, 1e-4),
    (0.3, 0.999, 1, 1e-3),
    (100.0, 0.3, 5, 1e-5),
    (100.0, 1e-5, 1, 1e-4),
]


@pytest.mark.parametrize("case", COMPOSED)
def test_composed_distributions_are_equal(case):
    sigma, rate, steps, interval = case
    one = one_step.sampled_gaussian(sigma, rate, interval)
    ours, theirs = grid.self_composed(one, steps), one.self_compose(steps)
    for pair in ((ours._pmf_remove, theirs._pmf_remove), (ours._pmf_add, theirs._pmf_add)):
        mine, other = pair
        assert (mine._lower_loss, mine.size) == (other._lower_loss, other.size)
        assert mine._infinity_mass == other._infinity_mass
        assert np.array_equal(mine._probs, other._probs)


@pytest.mark.parametrize("case", COMPOSED)
@pytest.mark.parametrize("delta", [0.0125, 1e-5, 1e-8])
def test_epsilons_are_equal(case, delta):
    sigma, rate, steps, interval = case
    loss = grid.self_composed(one_step.sampled_gaussian(sigma, rate, interval), steps)
    # (The package adds up the interval, whose rounding the losses then have.)
    assert grid.epsilon_at(loss, delta) == pytest.approx(
        loss.get_epsilon_for_delta(delta), rel=1e-9, abs=1e-12
    )


@pytest.mark.parametrize("symmetric", [True, False])
def test_epsilons_of_few_points_and_infinite_losses(symmetric):
    """Sparse distributions; infinite losses; losses whose exp(-loss) rounds to 0; none above 0."""
    for losses in ({0: 0.5, 3: 0.3}, {3: 0.3, 900: 0.5}, {-5: 0.6, -1: 0.2}, {2: 0.8}, {900: 0.8}):
        for infinite in (0.0, 0.2):
            pmf = google_pld.pld_pmf.create_pmf(losses, 1.0, infinite, True)
            loss = google_pld.PrivacyLossDistribution(*[pmf] * (1 if symmetric else 2))
            for delta in (0.01, 0.2, 0.25, 0.5, 0.9):
                found = grid.epsilon_at(loss, delta)
                assert found == pytest.approx(loss.get_epsilon_for_delta(delta), rel=1e-14)


def test_the_worse_direction_counts():
    strong, weak = (google_pld.pld_pmf.create_pmf({at: 1.0}, 1.0, 0.0, True) for at in (5, 1))
    for pair in ((strong, weak), (weak, strong)):
        loss = google_pld.PrivacyLossDistribution(*pair)
        assert grid.epsilon_at(loss, 0.1) == pytest.approx(5 + math.log(0.9))
