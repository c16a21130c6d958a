"""Ranks by sorting, skew-normals by sums on a grid, and what epsilon allows by adding up ranks."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import log_ndtr, logsumexp
from scipy.stats import norm, skewnorm

from hf_dp.audit.exposure import AT_RANDOM, approximate, exact, log_cdf, most_exposed
from hf_dp.errors import DataError, InvalidArgumentError

# A language model of three words by itself: -log2 p of a suffix of four is a sum over its words.
BITS = {"a": 0.5, "b": 2.25, "c": 3.0}
SPACE = {suffix: sum(BITS[word] for word in suffix) for suffix in itertools.product(BITS, repeat=4)}


def test_the_rank_is_the_place_in_the_sorted_space_behind_all_ties():
    in_order = sorted(SPACE, key=lambda suffix: (SPACE[suffix], suffix))
    for suffix, bits in SPACE.items():
        others = [value for other, value in SPACE.items() if other != suffix]
        found = exact(bits, others)
        places = [i + 1 for i, other in enumerate(in_order) if SPACE[other] == bits]
        assert (found.rank, found.tied, found.size) == (max(places), len(places) - 1, 81)
        assert found.exposure == pytest.approx(math.log2(81 / max(places)))


def test_the_least_perplexing_suffix_is_the_most_exposed():
    values = [value for suffix, value in SPACE.items() if suffix != ("a",) * 4]
    assert exact(SPACE[("a",) * 4], values).exposure == pytest.approx(math.log2(81))
    assert exact(99.0, values).exposure == 0


def test_of_a_model_that_knows_nothing_the_mean_is_1_44():
    values = np.random.default_rng(0).permutation(2000) / 7
    ranks = [exact(values[i], np.delete(values, i)).exposure for i in range(2000)]
    assert np.mean(ranks) == pytest.approx(AT_RANDOM, abs=0.01)
    assert AT_RANDOM == pytest.approx(quad(lambda u: -math.log2(u), 0, 1)[0])


def on_a_grid(z: float, shape: float) -> float:
    """ln P(Z <= z) by the trapezoid rule in logarithms, down to where nothing is left."""
    t = np.linspace(z - 12, z, 200_001)
    density = math.log(2) + norm.logpdf(t) + log_ndtr(shape * t)
    return float(logsumexp(density)) + math.log(t[1] - t[0])


@pytest.mark.parametrize("shape", [-6.0, -1.0, 0.0, 0.7, 3.0, 20.0])
@pytest.mark.parametrize("z", [-25.0, -8.0, -3.0, -1.0, 0.0, 2.0])
def test_the_distribution_function_is_the_integral_of_the_density(z, shape):
    assert log_cdf(z, shape) == pytest.approx(on_a_grid(z, shape), rel=1e-3, abs=1e-4)
    if shape == 0:
        assert log_cdf(z, shape) == pytest.approx(float(log_ndtr(z)), rel=1e-9)


@pytest.mark.parametrize("shape", [-3.0, 4.0])
def test_the_approximation_finds_a_known_skew_normal(shape):
    location, scale = 60.0, 5.0
    sample = skewnorm.rvs(shape, location, scale, size=8000, random_state=1)
    density = skewnorm(shape, location, scale).pdf
    for probability, bits in ((0.5, 0.05), (1e-2, 0.2), (1e-3, 0.5)):
        canary = float(skewnorm.ppf(probability, shape, location, scale))
        found = approximate(canary, sample)
        known = -math.log2(quad(density, -math.inf, canary, epsabs=1e-12)[0])
        assert known == pytest.approx(-math.log2(probability), rel=1e-3)
        assert found.exposure == pytest.approx(known, abs=bits)
        assert not found.extrapolated and found.distance < 0.02 and found.p_value > 0.05


def test_what_a_sample_cannot_tell_is_called_extrapolated():
    sample = skewnorm.rvs(2, 60, 5, size=1000, random_state=2)
    assert approximate(60.0, sample).extrapolated is False
    found = approximate(40.0, sample)
    assert found.exposure > 30 and found.extrapolated
    assert math.isfinite(approximate(-1e4, sample).exposure)


def test_a_bad_fit_shows():
    two_heaps = np.concatenate([np.linspace(0, 1, 500), np.linspace(50, 51, 500)])
    found = approximate(0.5, two_heaps)
    assert found.distance > 0.2 and found.p_value < 1e-6


@pytest.mark.parametrize(
    ("canary", "sample", "message"),
    [
        (1.0, [1.0, math.nan] * 100, "not all finite"),
        (math.inf, np.arange(200.0), "not all finite"),
        (1.0, np.arange(99.0), "at least 100"),
        (1.0, np.ones(200), "nothing to measure"),
    ],
)
def test_numbers_that_tell_nothing_are_refused(canary, sample, message):
    with pytest.raises(DataError, match=message):
        approximate(canary, sample)
    if message == "not all finite":
        with pytest.raises(DataError, match=message):
            exact(canary, sample)


@pytest.mark.parametrize(("epsilon", "delta", "r"), [(0.5, 0, 1), (3, 1e-4, 1), (1, 1e-3, 4)])
def test_epsilon_allows_what_the_leakiest_model_does(epsilon, delta, r):
    """Its canary is among the first k as often as the privacy of r rows allows, for every k."""
    size = 20_000
    k = np.arange(1, size + 1)
    slack = sum(delta * math.exp(i * epsilon) for i in range(r))
    among = np.minimum(1, math.exp(r * epsilon) * k / size + slack)
    mean = float(np.diff(among, prepend=0) @ (math.log2(size) - np.log2(k)))
    bound = most_exposed(epsilon, delta, r, size)
    assert mean <= bound <= mean + 0.02 + slack * 14.3 / 2


def test_epsilon_of_many_rows_allows_everything():
    assert most_exposed(3, 1e-5, 100, 100_000) == math.log2(100_000)
    assert most_exposed(1e-9, 0, 1, 100_000) == pytest.approx(AT_RANDOM, abs=1e-4)
    for wrong in ((0, 0, 1, 9), (1, -1, 1, 9), (1, 0, 0, 9), (1, 0, 1, 1)):
        with pytest.raises(InvalidArgumentError):
            most_exposed(*wrong)
