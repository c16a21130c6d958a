"""Epsilon in closed form for Gaussians with a visible number of uses, and randomized responses.

Given how often an example took part (which is visible and independent of its contents), its privacy
loss is normal; a randomized response adds one of at most three values to it. So ``delta(epsilon) =
sum over cases of P(case) delta_Gauss(epsilon - loss of the responses; mu of the case)``, with no
grid and no FFT: the definition itself is computed, up to rounding. Both directions of zero-out have
the same losses.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, logsumexp
from scipy.stats import binom

from hf_dp.accounting import knows
from hf_dp.accounting.composition import Composition
from hf_dp.accounting.events import RandomizedResponse

# Participation counts whose probabilities add up to less than this are left out; it is added to
# delta instead.
_TAIL = 1e-30


def covers(composition: Composition) -> bool:
    """Return whether the closed form describes the composition.

    It has no secret sample, no search, and at most one visible rate and noise.
    """
    known = {knows.POISSON, knows.VISIBLE, knows.RESPONSE}
    visible = composition.of(knows.VISIBLE)
    return composition.kinds <= known and not composition.sampled and len(visible) <= 1


def epsilon(composition: Composition, delta: float, scale: float = 1.0) -> float:
    """Return the smallest epsilon >= 0 at which the composition is (epsilon, delta)-DP.

    It is rounded up, with a relative accuracy of 1e-9.

    Args:
        scale: a factor on every Gaussian's sensitivity (2 under replace_one).
    """
    log_weights, mus = _participations(composition, scale)
    losses, log_probabilities = _responses(composition.responses)
    # All cases: a number of uses and the responses' loss.
    weights = np.add.outer(log_weights, log_probabilities).ravel()
    mu, shift = np.repeat(mus, len(losses)), np.tile(losses, len(mus))

    def excess(value: float) -> float:
        total = np.logaddexp(logsumexp(weights + _log_delta(value - shift, mu)), math.log(_TAIL))
        return float(total) - math.log(delta)

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    root = float(brentq(excess, 0.0, high, xtol=1e-13, rtol=1e-13))
    return root * (1 + 1e-9) + 1e-12


def _participations(composition: Composition, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probability and mu of each number of uses."""
    always = (composition.gaussian_mu * scale) ** 2
    if not (visible := composition.of(knows.VISIBLE)):
        return np.zeros(1), np.array([math.sqrt(always)])
    (term,) = visible
    law = binom(term.steps, term.sample_rate)
    # Bernstein: the number of uses is further from its mean m than sqrt(2 m L) + L with a
    # probability below exp(-L) on each side. With 1e9 samples, the most that are accepted, fewer
    # than a million numbers of uses remain.
    mean, away = term.steps * term.sample_rate, math.log(2 / _TAIL)
    reach = math.sqrt(2 * mean * away) + away
    low, high = max(0, math.floor(mean - reach)), min(term.steps, math.ceil(mean + reach))
    counts = np.arange(low, high + 1)
    return law.logpmf(counts), np.sqrt(always + counts * (scale / term.noise_multiplier) ** 2)


def _responses(terms: tuple[RandomizedResponse, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the privacy losses of all responses together, and their log-probabilities."""
    law = {0.0: 0.0}
    for term in terms:
        for _ in range(term.steps):
            once: dict[float, float] = {}
            for (before, p), (loss, q) in itertools.product(law.items(), response_losses(term)):
                once[before + loss] = float(np.logaddexp(once.get(before + loss, -math.inf), p + q))
            law = once
    return np.array(list(law)), np.array(list(law.values()))


def response_losses(term: RandomizedResponse) -> Iterator[tuple[float, float]]:
    """Yield (loss, log-probability) of one response, for one label against another."""
    log_total = term.epsilon + math.log1p((term.num_classes - 1) * math.exp(-term.epsilon))
    yield term.epsilon, term.epsilon - log_total
    yield -term.epsilon, -log_total
    if term.num_classes > 2:
        yield 0.0, math.log(term.num_classes - 2) - log_total


def _log_delta(value: np.ndarray, mu: np.ndarray) -> np.ndarray:
    """Return log ``E[(1 - exp(value - loss))+]`` for a normal loss.

    The loss has mean mu^2 / 2 and variance mu^2; for mu = 0 it is 0. See Balle and Wang 2018,
    Theorem 8. Values may be below 0, where a response has lowered the epsilon that is left.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        upper = log_ndtr(-value / mu + mu / 2)
        lower = value + log_ndtr(-value / mu - mu / 2)
        normal = np.where(
            lower < upper, upper + np.log(-np.expm1(np.minimum(lower - upper, -1e-300))), -np.inf
        )
        point = np.where(value < 0, np.log(-np.expm1(np.minimum(value, -1e-300))), -np.inf)
    return np.where(mu > 0, normal, point)
