"""The best of random runs, and two sums over one draw: against integrals of the exact densities."""

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import ndtr

from hf_dp.accounting import (
    ACCOUNTANTS,
    BestOfRandomRuns,
    Gaussian,
    PoissonSampledGaussian,
    TruncatedPoissonSampledGaussian,
    epsilon,
)
from hf_dp.accounting.composition import compose
from hf_dp.accounting.knows import TRUNCATED
from hf_dp.errors import UnsupportedEventError

DELTA = 1e-4


def exact_delta(sigma: float, mean: float, eps: float) -> float:
    """The hockey-stick divergence of the largest of K outputs, K geometric, where one output is
    N(1, sigma^2) with the record and N(0, sigma^2) without; the score is the output itself.

    The largest of K has the distribution function E F^K = p F / (1 - (1 - p) F), p = 1 / mean, and
    so the density p f / (1 - (1 - p) F)^2.
    """
    p = 1 / mean

    def density(x: float, center: float) -> float:
        z = (x - center) / sigma
        normal = math.exp(-z * z / 2) / (sigma * math.sqrt(2 * math.pi))
        return p * normal / (1 - (1 - p) * float(ndtr(z))) ** 2

    def excess(x: float, one: float, other: float) -> float:
        return max(0.0, density(x, one) - math.exp(eps) * density(x, other))

    low, high = -12 * sigma, 1 + 12 * sigma
    return max(
        quad(excess, low, high, args=pair, limit=400, points=[0, 1])[0] for pair in ((1, 0), (0, 1))
    )


@pytest.mark.parametrize("mean", [1.5, 3, 10, 100])
@pytest.mark.parametrize("sigma", [1.0, 3.0])
def test_the_bound_holds_for_the_exact_best_of_random_runs(sigma, mean):
    run = Gaussian(sigma, 1)
    bound = epsilon(BestOfRandomRuns((run,), mean), DELTA, "rdp").value
    assert exact_delta(sigma, mean, bound) <= DELTA


def test_what_one_run_costs_is_too_little_for_a_search():
    """The planted bug: the best is released, and only its own run is counted."""
    one = epsilon(Gaussian(1.0, 1), DELTA, "pld").value
    assert exact_delta(1.0, 10, one) > 1.2 * DELTA


@pytest.mark.parametrize("shape", [0, 1e-6, 1.0, 1e6])
@pytest.mark.parametrize("mean_runs", [1 + 1e-6, 2.0, 1e9])
def test_searches_at_the_edge_are_computed(mean_runs, shape):
    search = BestOfRandomRuns((Gaussian(1.0, 1),), mean_runs, shape=shape)
    assert epsilon(search, 1e-6, "rdp").value >= epsilon(Gaussian(1.0, 1), 1e-6, "rdp").value


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_neither_rdp_of_a_truncated_run_nor_pld_of_a_search_is_known(accountant):
    capped = BestOfRandomRuns((TruncatedPoissonSampledGaussian(1.0, 0.1, 10, 100, 12),), 10)
    with pytest.raises(UnsupportedEventError):
        epsilon(capped, 1e-5, accountant)


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
