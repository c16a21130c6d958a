"""The bound for the best of a random number of runs, against the exact distribution of the best."""

from __future__ import annotations

import math

import pytest
from scipy.integrate import quad
from scipy.special import ndtr

from hf_dp.accounting import (
    ACCOUNTANTS,
    BestOfRandomRuns,
    Gaussian,
    TruncatedPoissonSampledGaussian,
    epsilon,
)
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
