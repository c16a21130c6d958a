"""Calibration: on the private side, tight, and refusing what cannot be done."""

from __future__ import annotations

import pytest

from hf_dp.accounting import (
    Gaussian,
    PoissonSampledGaussian,
    RandomAllocationGaussian,
    accountants,
    calibrate_noise_multiplier,
    calibrate_steps,
    epsilon,
)
from hf_dp.errors import AccountingRangeError, CalibrationError, InvalidArgumentError

Q, STEPS, DELTA = 1024 / 67349, 198, 1 / (2 * 67349)


def assert_private_and_tight(sigma, target, delta, q, steps, accountant, prior=()):
    def cost(value):
        return epsilon((*prior, PoissonSampledGaussian(value, q, steps)), delta, accountant).value

    assert cost(sigma) <= target, "the returned noise does not meet the target"
    assert cost(sigma / (1 + accountants.TOLERANCE)) > target, "less noise would have done"


# smallest sigmas: RDP from Opacus 1.6; PLD from dp-accounting's own calibration, without our slack
# (at most 3e-4 of sigma)
@pytest.mark.parametrize(
    ("target", "accountant", "sigma", "above"),
    [
        (3, "rdp", 0.82539, 2e-4),
        (8, "rdp", 0.58027, 1e-3),
        (3, "pld", 0.764883, 3e-4),
        pytest.param(3, "prv", 0.764883, 2e-3, marks=pytest.mark.slow),
    ],
)
def test_sst2(target, accountant, sigma, above):
    found = calibrate_noise_multiplier(target, DELTA, Q, STEPS, accountant)
    assert sigma - 1e-5 <= found <= sigma * (1 + above)
    assert_private_and_tight(found, target, DELTA, Q, STEPS, accountant)
    assert float(f"{found:.6g}") == found  # the published digits are the number used


@pytest.mark.parametrize(
    ("target", "delta", "q", "steps"),
    [(0.1, 1e-6, 0.001, 100), (1, 1e-5, 1.0, 1), (2, 1e-7, 0.2, 3)],
)
@pytest.mark.parametrize("accountant", [pytest.param("pld", marks=pytest.mark.slow), "rdp"])
def test_corners(target, delta, q, steps, accountant):
    found = calibrate_noise_multiplier(target, delta, q, steps, accountant)
    assert_private_and_tight(found, target, delta, q, steps, accountant)


@pytest.mark.parametrize(("accountant", "sigma"), [("rdp", 1.765027), ("pld", 1.3)])
def test_prior_events_are_paid_for(accountant, sigma):
    # DP-FROST: the selection gets what 198 training steps leave of epsilon 0.5
    prior = (PoissonSampledGaussian(2.105664 if accountant == "rdp" else 1.94331, Q, STEPS),)
    found = calibrate_noise_multiplier(0.5, DELTA, 0.02, 5, accountant, prior)
    assert found == pytest.approx(sigma, rel=1e-4 if accountant == "rdp" else 0.02)
    assert_private_and_tight(found, 0.5, DELTA, 0.02, 5, accountant, prior)


def test_prior_events_that_only_pld_knows_are_paid_for():
    """RDP, which says where to begin the search, cannot describe them."""
    prior = (RandomAllocationGaussian(4.0, 8, 8),)
    found = calibrate_noise_multiplier(2.0, 1e-3, 0.1, 5, "pld", prior)
    assert_private_and_tight(found, 2.0, 1e-3, 0.1, 5, "pld", prior)


def test_the_test_above_would_notice_the_wrong_side():
    sigma = calibrate_noise_multiplier(3, DELTA, Q, STEPS, "rdp")
    with pytest.raises(AssertionError, match="does not meet"):
        assert_private_and_tight(sigma * (1 - 1e-4), 3, DELTA, Q, STEPS, "rdp")
    with pytest.raises(AssertionError, match="less noise"):
        assert_private_and_tight(sigma * (1 + 2e-4), 3, DELTA, Q, STEPS, "rdp")


def test_an_estimate_is_refused():
    needs = "Calibration needs a bound; 'gdp_clt' is an estimate"
    with pytest.raises(InvalidArgumentError, match=needs):
        calibrate_noise_multiplier(3, DELTA, Q, STEPS, "gdp_clt")
    with pytest.raises(InvalidArgumentError, match=needs):
        calibrate_steps(3, DELTA, 1.0, Q, "gdp_clt")


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_unreachable_targets_say_why(accountant):
    with pytest.raises(CalibrationError, match="0.001 is not met even at noise multiplier 1000?"):
        calibrate_noise_multiplier(1e-3, 1e-6, 1.0, 100000, accountant)
    with pytest.raises(CalibrationError, match="prior events alone cost epsilon"):
        calibrate_noise_multiplier(1, 1e-6, 0.01, 10, accountant, [Gaussian(1.0)])
    with pytest.raises(CalibrationError, match="met even at noise multiplier 0.*Lower `target_ep"):
        calibrate_noise_multiplier(1e5, 1e-6, 1e-4, 1, accountant)


def test_bad_values_and_ranges():
    good = (3, DELTA, Q, 1)
    for place, bad in ((0, 0), (0, -1), (1, 0), (2, 0), (2, 1.5), (3, 0)):
        with pytest.raises(InvalidArgumentError):
            calibrate_noise_multiplier(*good[:place], bad, *good[place + 1 :])
    with pytest.raises(AccountingRangeError, match="delta"):
        calibrate_noise_multiplier(3, 1e-12, Q, STEPS)
    with pytest.raises(AccountingRangeError, match="sample_rate"):
        calibrate_noise_multiplier(3, 1e-6, 1e-9, STEPS)


@pytest.mark.parametrize(
    ("accountant", "prior"),
    [("rdp", ()), pytest.param("pld", (), marks=pytest.mark.slow), ("rdp", (Gaussian(4.0),))],
)
def test_steps_are_the_most_that_fit(accountant, prior):
    steps = calibrate_steps(3, DELTA, 0.83, Q, accountant, prior)
    assert steps > 0

    def cost(count):
        return epsilon((*prior, PoissonSampledGaussian(0.83, Q, count)), DELTA, accountant).value

    assert cost(steps) <= 3 < cost(steps + 1)


def test_steps_edges():
    assert calibrate_steps(3, DELTA, 0.0, Q) == 0
    assert calibrate_steps(0.1, DELTA, 0.5, Q) == 0
    assert calibrate_steps(1, DELTA, 1.0, Q, prior_events=Gaussian(1.0)) == 0
    with pytest.raises(CalibrationError, match="stay inside target_epsilon"):
        calibrate_steps(3, DELTA, 50.0, 1e-5, "rdp")
    with pytest.raises(CalibrationError, match="stay inside target_epsilon"):
        calibrate_steps(3, DELTA, 1.0, 0.0, "rdp")
