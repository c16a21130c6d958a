"""A noisy sum of gradients and one of losses over one draw: one Gaussian mechanism.

Compared with a numerical integral over the two released numbers, which knows nothing of it.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from hf_dp.accounting import (
    ACCOUNTANTS,
    PoissonSampledGaussian,
    TruncatedPoissonSampledGaussian,
    epsilon,
)
from hf_dp.accounting.composition import compose
from hf_dp.accounting.knows import TRUNCATED

SIGMA, OF_LOSS, RATE = 0.9, 2.0, 0.2
JOINT = (SIGMA**-2 + OF_LOSS**-2) ** -0.5


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_it_costs_what_one_sum_with_the_joint_noise_costs(accountant):
    got = epsilon(
        PoissonSampledGaussian(SIGMA, 0.02, 50, beside={"loss": OF_LOSS}), 1e-5, accountant
    )
    expected = epsilon(PoissonSampledGaussian(JOINT, 0.02, 50), 1e-5, accountant)
    assert got.value == pytest.approx(expected.value, rel=1e-9) and got.kind == expected.kind
    alone = epsilon(PoissonSampledGaussian(SIGMA, 0.02, 50), 1e-5, accountant)
    assert got.value > 1.05 * alone.value


def delta_on_a_grid(value: float, order: int) -> float:
    """delta(value) of one step by a sum over the plane of what is released.

    In units of a release without the example's: its gradient adds C = 0.1 along one axis, its loss
    B = 3 along the other. Args: order: 1 with the example first, -1 without it first.
    """
    gradient, loss = 0.1, 3.0
    stds = (SIGMA * gradient, OF_LOSS * loss)
    x = np.linspace(-9 * stds[0], gradient + 9 * stds[0], 1500)
    y = np.linspace(-9 * stds[1], loss + 9 * stds[1], 1500)

    def density(at: np.ndarray, mean: float, std: float) -> np.ndarray:
        return np.exp(-(((at - mean) / std) ** 2) / 2) / (std * math.sqrt(2 * math.pi))

    without = np.outer(density(x, 0, stds[0]), density(y, 0, stds[1]))
    drawn = np.outer(density(x, gradient, stds[0]), density(y, loss, stds[1]))
    first, second = (RATE * drawn + (1 - RATE) * without, without)[::order]
    cell = (x[1] - x[0]) * (y[1] - y[0])
    return float(np.maximum(first - math.exp(value) * second, 0).sum() * cell)


def costs_no_more_than(event: PoissonSampledGaussian, accountant: str) -> bool:
    """Whether the epsilon of one step of ``event`` bounds both directions at delta 1e-5."""
    value = epsilon(event, 1e-5, accountant).value
    return max(delta_on_a_grid(value, order) for order in (1, -1)) <= 1e-5


@pytest.mark.parametrize("accountant", ["pld", "rdp", "prv"])
def test_its_epsilon_bounds_the_integral_over_both_releases(accountant):
    assert costs_no_more_than(
        PoissonSampledGaussian(SIGMA, RATE, 1, beside={"loss": OF_LOSS}), accountant
    )


def test_the_bound_is_tight():
    value = epsilon(PoissonSampledGaussian(SIGMA, RATE, 1, beside={"loss": OF_LOSS}), 1e-5).value
    assert delta_on_a_grid(value - 0.02, 1) > 1e-5


@pytest.mark.parametrize(
    "planted",
    [
        PoissonSampledGaussian(SIGMA, RATE, 1),  # the loss for nothing
        PoissonSampledGaussian(math.hypot(SIGMA, OF_LOSS), RATE, 1),
        PoissonSampledGaussian(SIGMA, RATE, 1, beside={"loss": OF_LOSS * 1.1}),
    ],
)
def test_planted_events_that_cost_too_little_are_seen(planted):
    assert not costs_no_more_than(planted, "pld")


def test_truncated_samples_are_one_sum_too():
    event = TruncatedPoissonSampledGaussian(SIGMA, 0.1, 2, 20, 5, beside={"loss": OF_LOSS})
    as_one = TruncatedPoissonSampledGaussian(event.joint_noise_multiplier, 0.1, 2, 20, 5)
    assert compose(event) == compose(as_one) and compose(event).kinds == {TRUNCATED}
