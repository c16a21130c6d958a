"""Bounds from guesses: against mechanisms whose privacy is known exactly, and against counting."""

import math
from collections import Counter
from statistics import NormalDist

import numpy as np
import pytest
from scipy.stats import binom

from hf_dp.accounting import Gaussian, PoissonSampledGaussian, epsilon
from hf_dp.accounting.gdp_clt import gaussian_epsilon, gaussian_mu
from hf_dp.accounting.one_run import (
    best_number_of_guesses,
    claimed_curve,
    epsilon_at_least,
    mu_at_least,
    p_value,
    refutes_curve,
)
from hf_dp.errors import InvalidArgumentError

NORMAL = NormalDist()


def gaussian_inverse(mu):
    return lambda y: NORMAL.cdf(NORMAL.inv_cdf(y) - mu) if 0 < y < 1 else max(0.0, min(1.0, y))


def pure_inverse(eps):
    """F^-1 of pure epsilon-DP: F(x) = min(e^eps x, 1 - e^-eps (1 - x))."""
    return lambda y: max(math.exp(-eps) * y, 1 - math.exp(eps) * (1 - y), 0.0)


# -- without delta: randomized response is the worst there is --


@pytest.mark.parametrize("eps", [0.0, 0.5, 3.0])
def test_of_pure_dp_it_is_the_tail_of_randomized_response(eps):
    right = math.exp(eps) / (1 + math.exp(eps))
    for correct in (0, 20, 31, 40):
        exact = sum(binom.pmf(i, 40, right) for i in range(correct, 41))
        assert p_value(90, 40, correct, eps, 0.0) == pytest.approx(exact, rel=1e-9)


def test_delta_pays_for_a_mechanism_that_tells_all_with_that_probability():
    for canaries in (1, 10, 300):
        assert p_value(canaries, canaries, canaries, 0.0, 0.02) >= 0.02


def test_delta_is_paid_for_as_the_theorem_says():
    m, r, v, eps, delta = 90, 40, 33, 1.0, 1e-3
    w = binom(r, 1 / (1 + math.exp(-eps)))
    most = max((w.sf(v - i - 1) - w.sf(v - 1)) / i for i in range(1, m + 1))
    assert p_value(m, r, v, eps, delta) == pytest.approx(w.sf(v - 1) + 2 * m * delta * most)


def test_the_bound_on_epsilon_is_where_the_probability_is_the_level():
    for canaries, guesses, correct, delta in ((100, 60, 50, 0.0), (1000, 200, 190, 1e-5)):
        found = epsilon_at_least(canaries, guesses, correct, delta)
        assert p_value(canaries, guesses, correct, found, delta) <= 0.05
        assert p_value(canaries, guesses, correct, found + 1e-3, delta) > 0.05
        surer = epsilon_at_least(canaries, guesses, correct, delta, 0.999)
        assert 0 < surer < found
    assert epsilon_at_least(100, 60, 30, 0.0) == 0.0
    assert epsilon_at_least(100, 60, 0, 0.0) == 0.0


# -- f-DP --


@pytest.mark.parametrize("eps", [0.3, 1.5])
@pytest.mark.parametrize("guesses", [20, 60])
def test_randomized_response_is_not_refuted_by_its_own_trade_off(eps, guesses):
    """Exactly: where P(correct >= v) is at least the level, there is no refutation."""
    right = math.exp(eps) / (1 + math.exp(eps))
    for level in (0.05, 1e-3):
        for correct in range(guesses + 1):
            if binom.sf(correct - 1, guesses, right) >= level:
                assert not refutes_curve(60, guesses, correct, pure_inverse(eps), level)


def test_a_mechanism_that_seldom_tells_much_is_not_refuted():
    """With probability t all coins are told by randomized response, else nothing. Its trade-off is
    that of an event within the t."""
    t, eps, m = 0.05, 3.0, 50
    right = math.exp(eps) / (1 + math.exp(eps))

    def inverse(y):  # F(x) = the best of: t (1 - (1 - x / t) e^-eps) and t e^eps x / t; then x - ..
        told = min(y, t)
        return t * pure_inverse(eps)(told / t) + max(0.0, y - t)

    for correct in range(m + 1):
        exact = t * binom.sf(correct - 1, m, right) + (1 - t) * binom.sf(correct - 1, m, 0.5)
        for level in (0.05, 0.01):
            if exact >= level:
                assert not refutes_curve(m, m, correct, inverse, level), correct


@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0])
def test_independent_gaussians_are_not_refuted_more_often_than_allowed(mu):
    draw, m, trials = np.random.default_rng(0), 400, 200
    claim = gaussian_inverse(mu)
    found = Counter()
    true = gaussian_epsilon(mu, 1e-5)
    for _ in range(trials):
        coins = draw.random(m) < 0.5
        order = np.argsort(draw.normal(size=m) + mu * coins)
        correct = int(coins[order[-20:]].sum() + (~coins[order[:20]]).sum())
        found[correct] += 1
    above_epsilon = above_mu = refuted = 0
    for correct, times in found.items():
        above_epsilon += times * (p_value(m, 40, correct, true, 1e-5) <= 0.05)
        refuted += times * refutes_curve(m, 40, correct, claim, 0.05)
        above_mu += times * refutes_curve(m, 40, correct, claim, 1e-3)
    assert above_epsilon <= 0.1 * trials and refuted <= 0.1 * trials and above_mu == 0


def test_f_dp_tells_more_than_epsilon_and_delta():
    m, guesses, correct, delta = 1000, 100, 100, 1e-5
    mu = mu_at_least(m, guesses, correct)
    assert not refutes_curve(m, guesses, correct, gaussian_inverse(mu + 0.01), 0.05)
    assert refutes_curve(m, guesses, correct, gaussian_inverse(mu - 0.01), 0.05)
    assert gaussian_epsilon(mu, delta) > 0
    at_96 = mu_at_least(m, 100, 96), epsilon_at_least(m, 100, 96, delta)
    assert gaussian_epsilon(at_96[0], delta) > at_96[1] > 0


def test_a_claim_far_too_small_is_refuted():
    claim = claimed_curve(PoissonSampledGaussian(1.0, 0.01, 50))
    assert refutes_curve(500, 100, 95, claim, 1e-3)
    assert not refutes_curve(500, 100, 60, claim, 1e-3)
    assert p_value(
        500, 100, 95, epsilon(PoissonSampledGaussian(1.0, 0.01, 50), 1e-5).value, 1e-5
    ) < (1e-3)


def test_the_claimed_curve_of_a_gaussian_is_its_trade_off_from_below():
    found, exact = claimed_curve(Gaussian(1.0)), gaussian_inverse(1.0)
    for y in (0.01, 0.05, 0.2, 0.5):
        assert 0.9 * exact(y) - 1e-4 <= found(y) <= exact(y) + 1e-9


def test_guesses_are_decided_from_the_claim():
    assert best_number_of_guesses(1000, 8.0, 1e-5) < 1000
    for canaries in (10, 50, 1000):
        for eps in (0.0, 0.1, 1.0, 30.0):
            found = best_number_of_guesses(canaries, eps, 1e-5)
            assert 2 <= found <= canaries and found % 2 == 0
    assert gaussian_epsilon(gaussian_mu(3.0, 1e-5), 1e-5) == pytest.approx(3.0, rel=1e-3)


@pytest.mark.parametrize("counts", [(10, 11, 5), (10, 5, 6), (0, 0, 0), (10, 5, -1), (10, 5, 2.5)])
def test_counts_that_cannot_be_are_refused(counts):
    with pytest.raises(InvalidArgumentError, match="canaries|guesses|correct"):
        p_value(*counts, 1.0, 1e-5)
