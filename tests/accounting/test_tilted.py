"""Small deltas: against closed forms, the golden figures, extended precision and plain FFT."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as google_pld
from scipy import fft

from hf_dp.accounting import (
    Gaussian,
    PoissonSampledGaussian,
    RandomizedResponse,
    calibrate_noise_multiplier,
    epsilon,
    grid,
    tilted,
)
from hf_dp.accounting.one_step import sampled_gaussian
from hf_dp.errors import AccountingRangeError

DELTAS = (1e-6, 1e-8, 1e-9, 1e-10, 1e-11, 1e-13)


@pytest.mark.parametrize("delta", DELTAS)
def test_a_gaussian_has_a_closed_form(delta):
    loss = google_pld.from_gaussian_mechanism(2.0, value_discretization_interval=1e-4)
    exact = epsilon(Gaussian(2.0, 30), delta).value
    assert exact - 1e-7 <= tilted.epsilon_at([(loss, 30)], delta) <= exact + 1e-3


def in_extended_precision(loss, times, delta):
    """Plain composition with 64 bits of mantissa: another route to the same number."""
    found = []
    for pmf in (loss._pmf_remove, loss._pmf_add):
        dense = pmf.to_dense_pmf()
        length = fft.next_fast_len(times * dense.size)
        p = np.asarray(dense._probs, np.longdouble)
        composed = fft.irfft(fft.rfft(p, length) ** times, length)
        losses = (np.arange(length) + times * dense._lower_loss) * dense._discretization
        infinite = -math.expm1(times * math.log1p(-dense._infinity_mass))

        def too_much(value, losses=losses, composed=composed, infinite=infinite):
            above = losses > value
            terms = composed[above] * -np.expm1(value - losses[above])
            return float(terms.sum()) + infinite > delta

        low, high = 0.0, 60.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if too_much(middle) else (low, middle)
        found.append(high)
    return max(found)


@pytest.mark.parametrize(
    ("sigma", "q", "steps"), [(0.6, 0.05, 20), pytest.param(1.0, 0.01, 100, marks=pytest.mark.slow)]
)
def test_extended_precision_agrees(sigma, q, steps):
    loss = sampled_gaussian(sigma, q, 1e-3)
    for delta in DELTAS[1:5]:
        exact = in_extended_precision(loss, steps, delta)
        assert exact - 1e-6 <= tilted.epsilon_at([(loss, steps)], delta) <= exact + 1e-4


def test_where_rounding_does_not_matter_it_is_the_plain_composition():
    loss = sampled_gaussian(0.8, 0.02, 1e-4)
    plain = grid.self_composed(loss, 200)
    for delta in (1e-3, 1e-5, 1e-7):
        assert tilted.epsilon_at([(loss, 200)], delta) == pytest.approx(
            grid.epsilon_at(plain, delta), abs=1e-5
        )


def test_plain_composition_is_wrong_where_this_is_not():
    """Why it is there. How wrong, and in which direction, differs between processors."""
    loss = sampled_gaussian(0.5, 1e-4, 1e-4)
    plain = grid.epsilon_at(grid.self_composed(loss, 10_000), 1e-13)
    assert abs(plain - tilted.epsilon_at([(loss, 10_000)], 1e-13)) > 0.02


def test_parts_add_up():
    one, other = sampled_gaussian(1.0, 0.01, 1e-3), sampled_gaussian(2.0, 0.2, 1e-3)
    for delta in (1e-7, 1e-11):
        whole = tilted.epsilon_at([(one, 300)], delta)
        assert tilted.epsilon_at([(one, 100), (one, 200)], delta) == pytest.approx(whole, abs=1e-6)
        both = tilted.epsilon_at([(one, 300), (other, 10)], delta)
        plain = grid.self_composed(one, 300).compose(grid.self_composed(other, 10))
        assert both > whole
        if delta == 1e-7:
            assert both == pytest.approx(grid.epsilon_at(plain, delta), abs=1e-5)


def test_infinite_losses_are_never_within_a_delta_below_them():
    certain = google_pld.from_gaussian_mechanism(
        1.0, value_discretization_interval=1e-2, log_mass_truncation_bound=-12
    )
    mass = certain._pmf_remove._infinity_mass
    assert tilted.epsilon_at([(certain, 1)], mass / 2) == math.inf
    assert math.isfinite(tilted.epsilon_at([(certain, 1)], mass * 50))
    assert tilted.epsilon_at([(certain, 100)], mass * 50) == math.inf


def test_an_epsilon_of_zero():
    loss = sampled_gaussian(5.0, 0.01, 1e-4)
    assert tilted.epsilon_at([(loss, 1)], 0.1) == 0.0


def test_the_default_accountant_reaches_delta_1e_11():
    event = PoissonSampledGaussian(1.0, 0.01, 1000)
    at_1e_11 = epsilon(event, 1e-11).value
    assert at_1e_11 < epsilon(event, 1e-11, "rdp").value - 0.3
    assert epsilon([event, Gaussian(3.0)], 1e-11).value > at_1e_11
    rising = [epsilon(event, delta).value for delta in (1e-7, 1.01e-8, 0.99e-8, 1e-9, 1e-11)]
    assert rising == sorted(rising)
    sigma = calibrate_noise_multiplier(2.0, 1e-10, 0.01, 100)
    assert 1.99 < epsilon(PoissonSampledGaussian(sigma, 0.01, 100), 1e-10).value <= 2.0


def test_where_rounding_cannot_be_bounded_it_is_rdp():
    event = PoissonSampledGaussian(1.0, 1e-4, 100_000)
    assert tilted.epsilon_at([(sampled_gaussian(1.0, 1e-4, 1e-4), 100_000)], 1e-11) == math.inf
    assert epsilon(event, 1e-11).value <= epsilon(event, 1e-11, "rdp").value


def test_other_mechanisms_are_refused_there():
    events = (PoissonSampledGaussian(1.0, 0.1, 10), RandomizedResponse(1.0, 3))
    assert epsilon(events, 1e-7).value > 0
    with pytest.raises(AccountingRangeError, match="`delta` >= 1e-07"):
        epsilon(events, 1e-9)
    with pytest.raises(AccountingRangeError, match="`delta` >= 1e-11"):
        epsilon(events[0], 1e-12)
