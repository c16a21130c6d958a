"""Rates below 1e-5: against closed forms of one step and of binomial losses, and against estimates.

The estimates keep each cell's mean and mass (no connect-the-dots rule), are composed by an untilted
Fourier transform with 64 bits of mantissa, and are extrapolated from two grids.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting.pld import pld_pmf
from scipy.optimize import brentq
from scipy.special import ndtr
from scipy.stats import binom

from hf_dp.accounting import (
    Gaussian,
    PoissonSampledGaussian,
    RandomizedResponse,
    calibrate_noise_multiplier,
    calibrate_sample_rate,
    epsilon,
    small_rates,
)
from hf_dp.accounting.tilted import Loss
from hf_dp.errors import AccountingRangeError

slow = pytest.mark.slow


def closed_form(sigma, rate, epsilon, direction):
    """Return delta of one step, where some outcome has a larger loss than epsilon."""
    loss = epsilon if direction == "remove" else -epsilon
    x = sigma**2 * np.log1p(np.expm1(loss) / rate) + 0.5
    if direction == "remove":
        return rate * ndtr((1 - x) / sigma) - (np.expm1(epsilon) + rate) * ndtr(-x / sigma)
    most = rate * np.exp(epsilon) - np.expm1(epsilon)
    return most * ndtr(x / sigma) - rate * np.exp(epsilon) * ndtr((x - 1) / sigma)


@pytest.fixture(params=[(0.3, 1e-8), (1.0, 1e-6), (4.0, 1e-2)])
def one_step_is_right(request):
    """Compare delta at points of the grid with the closed form."""
    sigma, rate = request.param
    lost, largest = 1e-4 * rate, math.log1p(rate * math.expm1((0.5 + 5 * sigma) / sigma**2))

    def check():
        for interval in largest / np.array([10, 300, 10_000]):
            both = small_rates.one_step(sigma, rate, interval, lost)
            for direction, loss in zip(("remove", "add"), both, strict=True):
                masses = np.exp(loss.log_p)
                for at in np.linspace(1, len(masses) - 2, 40).astype(int):
                    epsilon = loss.losses[at]
                    if epsilon < 0 or (direction == "add" and epsilon >= -math.log1p(-rate)):
                        continue
                    found = masses[at:] @ -np.expm1(epsilon - loss.losses[at:]) + loss.infinite
                    exact = closed_form(sigma, rate, epsilon, direction)
                    assert exact * (1 - 1e-9) <= found <= exact * (1 + 1e-9) + lost

    return check


def test_one_step_has_the_deltas_of_the_closed_form(one_step_is_right):
    one_step_is_right()


def rounded_down(losses, probabilities, interval):
    return on_grid(losses - interval / 2, probabilities, interval)


def without_infinite(pmf):
    loss = Loss(pmf)
    loss.infinite = 0.0
    return loss


on_grid = small_rates._on_grid


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("small_rates._on_grid", rounded_down),
        ("tilted.Loss", without_infinite),
    ],
)
def test_a_planted_error_is_seen(monkeypatch, one_step_is_right, name, planted):
    monkeypatch.setattr(f"hf_dp.accounting.{name}", planted)
    with pytest.raises(AssertionError):
        one_step_is_right()


@pytest.mark.parametrize("steps", [1, 7, 10**4, 10**6])
def test_binomial_losses_have_a_closed_form(steps):
    """Each step has loss 0 or one interval."""
    interval = 1e-4
    for mean in (0.5, 30.0):
        often = min(0.3, mean / steps)
        loss = Loss(pld_pmf.DensePLDPmf(interval, 0, np.array([1 - often, often]), 0.0, True))
        for tilt in (1.0, 1e4, 3e4):
            moved = often * math.exp(tilt * interval)
            first, found, error = small_rates._composed([(loss, steps)], tilt)
            exact = binom.pmf(np.arange(len(found)) + first, steps, moved / (1 - often + moved))
            assert np.abs(found - exact).max() <= error <= 1e-11
        counts = np.arange(steps + 1)[:1000]
        masses = binom.pmf(counts, steps, often)

        def gap(value, delta, masses=masses, losses=counts * interval):
            return masses @ np.maximum(-np.expm1(value - losses), 0.0) - delta

        for delta in (1e-6, 1e-9, 1e-11):
            exact = brentq(gap, 0.0, 0.1, (delta,), 1e-15) if gap(0.0, delta) > 0 else 0.0
            value = small_rates._one_way([(loss, steps)], delta, 0.0, 0.1)
            assert exact <= value <= exact * (1 + 1e-3) + 1e-9


def test_one_step_has_a_closed_form():
    generator = np.random.default_rng(0)
    for _ in range(8):  # less noise has losses of more sizes than a grid has points for
        sigma, rate = generator.uniform(1.0, 4.0), 10 ** generator.uniform(-8, -5)
        delta = max(rate * 10 ** generator.uniform(-4, -1), 1e-11)
        value = epsilon(PoissonSampledGaussian(sigma, rate, 1), delta).value
        exact = [0.0]
        for direction in ("remove", "add"):
            end = rate * (1 - 1e-9) if direction == "add" else 60.0

            def gap(value, direction=direction):
                return closed_form(sigma, rate, value, direction) - delta  # noqa: B023

            if gap(0.0) > 0:
                exact.append(brentq(gap, 0.0, end, xtol=1e-20, rtol=1e-14))
        assert max(exact) <= value <= 1.1 * max(exact)


# sigma, rate, steps, delta, estimate
ESTIMATES = [
    (1.0, 1e-8, 10**6, 1e-6, 1.37318e-5),
    (4.0, 9e-6, 10**6, 1e-10, 1.152349e-2),
    (0.5, 1e-6, 10**3, 1e-10, 0.1383928),
    (0.3, 1e-8, 3 * 10**4, 1e-10, 3.138707),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (0.5, 1e-6, 10**6, 1e-6, 0.05968),
            (0.5, 1e-8, 10**6, 1e-10, 0.003448),
            (0.5, 1e-7, 10**5, 1e-8, 0.005979),
            (0.5, 1e-7, 10**6, 1e-5, 1.4913e-3),
            (0.5, 1e-6, 10**6, 1e-8, 0.29607),
            (1.0, 1e-6, 10**3, 1e-10, 2.4075e-4),
            (2.0, 1e-6, 10**6, 1e-5, 8.956e-4),
            (1.0, 1e-8, 10**6, 1e-8, 3.6673e-5),
        )
    ),
]


@pytest.mark.parametrize(("sigma", "rate", "steps", "delta", "estimate"), ESTIMATES)
def test_it_is_a_bound_and_close(sigma, rate, steps, delta, estimate):
    value = epsilon(PoissonSampledGaussian(sigma, rate, steps), delta).value
    assert estimate * (1 - 1e-4) <= value <= 1.1 * estimate


def test_other_events_count():
    small, plain = PoissonSampledGaussian(1.0, 1e-6, 1000), Gaussian(3.0)
    alone = epsilon(plain, 1e-6).value
    assert alone < epsilon([small, plain], 1e-6).value < 1.1 * alone
    large = PoissonSampledGaussian(1.0, 1e-2, 100)
    assert epsilon([small, large], 1e-6).value > epsilon(large, 1e-6).value - 1e-3


def test_what_this_does_not_know_is_refused():
    small, response = PoissonSampledGaussian(1.0, 1e-6, 1000), RandomizedResponse(1.0, 3)
    with pytest.raises(AccountingRangeError, match="`sample_rate` >= 1e-05"):
        epsilon([small, response], 1e-6)
    with pytest.raises(AccountingRangeError, match="`sample_rate` >= 1e-05"):
        epsilon(small, 1e-6, relation="replace_one")
    # A search for a rate begins where the events before it allow it.
    assert calibrate_sample_rate(2.0, 1e-6, 1.0, 100, prior_events=[response]) > 1e-5


@slow
def test_noise_and_rate_are_calibrated():
    sigma = calibrate_noise_multiplier(0.01, 1e-8, 1e-6, 1000)
    assert epsilon(PoissonSampledGaussian(sigma, 1e-6, 1000), 1e-8).value <= 0.01
    rate = calibrate_sample_rate(1e-3, 1e-8, 1.0, 1000)
    assert epsilon(PoissonSampledGaussian(1.0, rate, 1000), 1e-8).value <= 1e-3
