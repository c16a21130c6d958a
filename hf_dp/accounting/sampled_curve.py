"""The Renyi divergence of one Poisson-sampled Gaussian step, at all orders at once.

The formulas are those of Mironov, Talwar, Zhang 2019 (arXiv 1908.10530), section 3.3, as
dp-accounting has them: log A_a of integer orders is a finite sum, and that of fractional orders two
series whose terms are added without their signs, a bound from above. The package adds term by term
in Python, which was most of the time of a calibration.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy.special import gammaln, log_ndtr

MOST_TERMS = 1000
"""Terms of a series, after which its order is left out."""

_BLOCK = 50  # terms at a time; most series need fewer
_NEGLIGIBLE = 30.0  # a term is small when it is below the sum by this factor, in logarithms


def log_moments(
    noise_multiplier: float, sample_rate: float, orders: tuple[float, ...]
) -> np.ndarray:
    """Return log A_a for each order a, infinity where its series does not converge.

    Args:
        noise_multiplier: > 0.
        sample_rate: in (0, 1).
        orders: each above 1.
    """
    found = np.full(len(orders), np.inf)
    whole = np.array([order.is_integer() for order in orders])
    if whole.any():
        found[whole] = _finite_sums(noise_multiplier, sample_rate, orders)
    left = np.flatnonzero(~whole)
    series = _Series(noise_multiplier, sample_rate, np.asarray(orders)[left])
    for start in range(0, MOST_TERMS, _BLOCK):
        if not len(left):
            break
        converged, totals = series.add(start, start + _BLOCK)
        found[left[converged]] = totals
        left = left[~converged]
    return found


@lru_cache(maxsize=4)
def _binomials(orders: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (order, k, log of the binomial coefficient) for each term of all finite sums, and
    where each sum begins."""
    whole = [int(order) for order in orders if order.is_integer()]
    order = np.concatenate([np.full(n + 1, float(n)) for n in whole])
    k = np.concatenate([np.arange(n + 1.0) for n in whole])
    begins = np.cumsum([0, *(n + 1 for n in whole[:-1])])
    return order, k, _log_binomial(order, k), begins


def _log_binomial(n: np.ndarray, k: np.ndarray) -> np.ndarray:
    result: np.ndarray = gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)
    return result


def _finite_sums(sigma: float, rate: float, orders: tuple[float, ...]) -> np.ndarray:
    order, k, log_binomial, begins = _binomials(orders)
    terms = log_binomial + k * math.log(rate) + (order - k) * math.log1p(-rate)
    terms += (k * k - k) / (2 * sigma**2)
    largest = np.maximum.reduceat(terms, begins)
    counts = np.diff([*begins, len(terms)])
    sums = np.add.reduceat(np.exp(terms - np.repeat(largest, counts)), begins)
    result: np.ndarray = largest + np.log(sums)
    return result


class _Series:
    """The two series of each fractional order: integrals up to z0 and from z0 on."""

    def __init__(self, sigma: float, rate: float, orders: np.ndarray):
        self._sigma, self._rate, self._orders = sigma, rate, orders[:, None]
        self._z0 = sigma**2 * math.log(1 / rate - 1) + 0.5
        none = np.full((len(orders), 1), -np.inf)
        self._last, self._sums = (none, none), (none, none)

    def add(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Add terms ``start`` to ``end - 1``; return which orders converged, and their log A_a.

        An order has converged at the first term at which both series fall and both terms are
        negligible. It is left out from then on.
        """
        terms = self._terms(np.arange(start, end, dtype=float))
        falling = [
            term < np.concatenate([last, term[:, :-1]], axis=1)
            for term, last in zip(terms, self._last)
        ]
        sums = [
            np.logaddexp.accumulate(np.concatenate([before, term], axis=1), axis=1)[:, 1:]
            for term, before in zip(terms, self._sums)
        ]
        total = np.logaddexp(*sums)
        done = falling[0] & falling[1] & (np.maximum(*terms) < total - _NEGLIGIBLE)
        converged = done.any(axis=1)
        totals = total[converged, done[converged].argmax(axis=1)]
        self._orders = self._orders[~converged]
        self._last = (terms[0][~converged, -1:], terms[1][~converged, -1:])
        self._sums = (sums[0][~converged, -1:], sums[1][~converged, -1:])
        return converged, totals

    def _terms(self, i: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        log_rate, log_rest = math.log(self._rate), math.log1p(-self._rate)
        j, variance = self._orders - i, self._sigma**2
        log_binomial = _log_binomial(self._orders, i)
        below = log_binomial + i * log_rate + j * log_rest + (i * i - i) / (2 * variance)
        above = log_binomial + j * log_rate + i * log_rest + (j * j - j) / (2 * variance)
        # erfc(x / sqrt(2)) / 2 is the normal distribution's lower tail at -x.
        return (
            below + log_ndtr((self._z0 - i) / self._sigma),
            above + log_ndtr((j - self._z0) / self._sigma),
        )
