"""Truncated samples against exact quadrature on few examples.

Accountants that do not know them refuse.
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm

from hf_dp.accounting import PoissonSampledGaussian, TruncatedPoissonSampledGaussian, epsilon
from hf_dp.errors import UnsupportedEventError

GRID = np.linspace(-40, 40, 40_001)


@functools.cache
def noise_around(total, sigma):
    """Return the density of the noise on GRID; many samples have the same sum."""
    return norm.pdf(GRID, total, sigma)


def output_density(gradients, sigma, q, cap):
    """Return the density of one step's noisy sum, over all samples and all their truncations."""
    density = np.zeros_like(GRID)
    n = len(gradients)
    for size in range(n + 1):
        for drawn in itertools.combinations(range(n), size):
            chance = q**size * (1 - q) ** (n - size)
            parts = list(itertools.combinations(drawn, min(cap, size)))
            for part in parts:
                density += (
                    chance / len(parts) * noise_around(sum(gradients[i] for i in part), sigma)
                )
    return density


def hockey_stick(p, q, epsilon):
    return float(np.trapezoid(np.maximum(p - math.exp(epsilon) * q, 0), GRID))


@pytest.mark.parametrize(
    ("n", "cap"),
    [
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(3, 1, marks=pytest.mark.slow),
        (3, 2),
        pytest.param(4, 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("sigma", "q"), [(2.0, 0.9), pytest.param(1.0, 0.3, marks=pytest.mark.slow)]
)
def test_the_bound_holds_for_every_choice_of_unit_gradients(n, cap, sigma, q):
    """Zero-out of one of n examples, in both directions.

    The gradients are all those of 1-dimensional examples in {-1, 0, 1}.
    """
    delta = 1e-3
    bound = epsilon(TruncatedPoissonSampledGaussian(sigma, q, 1, n, cap), delta).value
    worst = 0.0
    for others in itertools.product((-1, 0, 1), repeat=n - 1):
        with_it = output_density((1, *others), sigma, q, cap)
        for without in (
            output_density((0, *others), sigma, q, cap),
            output_density(others, sigma, q, cap),
        ):
            worst = max(
                worst, hockey_stick(with_it, without, bound), hockey_stick(without, with_it, bound)
            )
    assert worst <= delta + 1e-9


def test_one_more_example_is_not_answered():
    """With cap = N and one example added, others are left out.

    Exact quadrature gives 9.577 where plain Poisson sampling has 4.378.
    """
    event = TruncatedPoissonSampledGaussian(1.0, 1.0, 1, 3, 3)
    three, four = (
        output_density((-1, -1, -1), 1.0, 1.0, 3),
        output_density((-1, -1, -1, 1), 1.0, 1.0, 3),
    )
    assert hockey_stick(four, three, epsilon(event, 1e-5).value) > 1e-5, (
        "what add_remove would have to cover"
    )
    with pytest.raises(UnsupportedEventError, match="add_remove.*zero_out"):
        epsilon(event, 1e-5, relation="add_remove")


@pytest.mark.parametrize(
    ("n", "batch", "cap"), [(67_349, 1024, 2465), (392_702, 2048, 4013), (10_000, 100, 680)]
)
def test_a_cut_that_never_happens_is_none(n, batch, cap):
    """Where the tail underflows, dp-accounting divides by it; here the draws are plain ones."""
    event = TruncatedPoissonSampledGaussian(1.0, batch / n, 10, n, cap)
    assert epsilon(event, 1e-6) == epsilon(PoissonSampledGaussian(1.0, batch / n, 10), 1e-6)
