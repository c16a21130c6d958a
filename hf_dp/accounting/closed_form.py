"""Epsilon in closed form for Gaussians with a visible number of uses.

Given how often an example took part (which is visible and independent of its contents), its privacy
loss is normal. So ``delta(epsilon) = sum over numbers of uses of P(number) delta_Gauss(epsilon; mu
of the number)``, with no grid and no FFT: the definition itself is computed, up to rounding. Both
directions of zero-out have the same losses.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, logsumexp
from scipy.stats import binom

from hf_dp.accounting import knows
from hf_dp.accounting.composition import Composition
from hf_dp.accounting.events import SampledRecordRelease

# Participation counts whose probabilities add up to less than this are left out; it is added to
# delta instead.
_TAIL = 1e-30


def covers(composition: Composition) -> bool:
    """Return whether the closed form describes the composition.

    It has no secret sample, no search, and at most one visible rate and noise.
    """
    known = {knows.POISSON, knows.VISIBLE}
    visible = composition.of(SampledRecordRelease)
    return composition.kinds <= known and not composition.sampled and len(visible) <= 1


def epsilon(composition: Composition, delta: float, scale: float = 1.0) -> float:
    """Return the smallest epsilon >= 0 at which the composition is (epsilon, delta)-DP.

    It is rounded up, with a relative accuracy of 1e-9.

    Args:
        scale: a factor on every Gaussian's sensitivity (2 under replace_one).
    """
    log_weights, mus = _participations(composition, scale)

    def excess(value: float) -> float:
        total = np.logaddexp(logsumexp(log_weights + _log_delta(value, mus)), math.log(_TAIL))
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
    if not (visible := composition.of(SampledRecordRelease)):
        return np.zeros(1), np.array([math.sqrt(always)])
    (event,) = visible
    law = binom(event.steps, event.sample_rate)
    # Bernstein: the number of uses is further from its mean m than sqrt(2 m L) + L with a
    # probability below exp(-L) on each side. With 1e9 samples, the most that are accepted, fewer
    # than a million numbers of uses remain.
    mean, away = event.steps * event.sample_rate, math.log(2 / _TAIL)
    reach = math.sqrt(2 * mean * away) + away
    low, high = max(0, math.floor(mean - reach)), min(event.steps, math.ceil(mean + reach))
    counts = np.arange(low, high + 1)
    return law.logpmf(counts), np.sqrt(always + counts * (scale / event.noise_multiplier) ** 2)


def _log_delta(value: float, mu: np.ndarray) -> np.ndarray:
    """Return log ``E[(1 - exp(value - loss))+]`` for a normal loss; -inf where mu is 0.

    The loss has mean mu^2 / 2 and variance mu^2. See Balle and Wang 2018, Theorem 8.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        upper = log_ndtr(-value / mu + mu / 2)
        lower = value + log_ndtr(-value / mu - mu / 2)
        normal = upper + np.log(-np.expm1(np.minimum(lower - upper, -1e-300)))
    return np.where((mu > 0) & (lower < upper), normal, -np.inf)
