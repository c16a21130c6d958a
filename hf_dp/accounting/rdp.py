"""Renyi accounting with Google's ``dp-accounting``: an upper bound without a grid, for any delta.

The curve of the Poisson-sampled Gaussian is from Mironov, Talwar, Zhang 2019 (arXiv 1908.10530),
section 3.3, as dp-accounting has it: log A_a of integer orders is a finite sum and exact, and that
of fractional orders two series whose terms are added without their signs, a bound from above (up to
0.5 % in the curve, 0.2 % in epsilon). The package adds term by term in Python, which was most of
the time of a calibration; here all orders are computed at once. Curves add up over steps and
events. The conversion to epsilon is from Canonne, Kamath, Steinke 2020 (arXiv 2004.00010),
Proposition 12, and the curve of the best of several runs from Papernot and Steinke 2021 (arXiv
2110.03620), Theorems 2 and 6; both are the package's.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant as google_rdp
from scipy.special import gammaln, log_ndtr

from hf_dp.accounting.composition import Composition, Epsilon, Range, compose
from hf_dp.accounting.events import SampledRecordRelease
from hf_dp.accounting.grid import best_of_runs

ORDERS = tuple(float(order) for order in google_rdp.DEFAULT_RDP_ORDERS)

# The bound is a theorem everywhere; these limits keep its floating-point evaluation away from
# overflow and from sums in which one step's divergence (about rate^2 / noise^2) is lost beside 1
# (checked against quadrature well inside).
RANGE = Range(
    "rdp",
    min_noise_multiplier=0.01,
    max_noise_multiplier=1000.0,
    min_sample_rate=1e-8,
    max_steps=10**9,
    min_delta=1e-100,
    next_move="Use a larger noise multiplier, or fewer steps; no accountant of hf_dp covers this "
    "range.",
)

# Added to each order's divergence for each step. log A_order is a sum near 0 for weak mechanisms,
# whose rounding error (below 1e-12, divided by order - 1 >= 0.1) may leave it too small or even
# negative; dp-accounting would report epsilon 0 for a negative one. At 1e6 steps the allowance
# costs 1e-5 of epsilon.
ROUNDING_ALLOWANCE = 1e-11

MOST_TERMS = 1000  # of a series, after which its order is left out
_FEW_TERMS = 50  # of most series
_NEGLIGIBLE = 30.0  # a term is small when it is below the sum by this factor, in logarithms


def epsilon(composition: Composition, delta: float, relation: str = "zero_out") -> Epsilon:
    """Return an upper bound on epsilon at ``delta``. Raises: AccountingRangeError outside RANGE."""
    RANGE.check(composition, delta)
    return Epsilon(epsilon_and_order(composition, delta)[0], "bound")


def epsilon_and_order(composition: Composition, delta: float) -> tuple[float, float]:
    """Return the smallest epsilon over ORDERS and its order, without a range check."""
    value, order = google_rdp.compute_epsilon(ORDERS, _total(composition), delta)
    return float(value), float(order)


def _total(composition: Composition) -> np.ndarray:
    """Return the curve of all events, which is the sum of theirs."""
    curve = composition.gaussian_mu**2 / 2 * np.asarray(ORDERS)
    for event in composition.sampled:
        curve = curve + event.steps * _curve(event.noise_multiplier, event.sample_rate)
    for seen in composition.of(SampledRecordRelease):
        curve = curve + seen.steps * _visible(seen.noise_multiplier, seen.sample_rate)
    for search in composition.searches:
        shape = math.inf if search.shape is None else search.shape
        of_one = _total(compose(search.run))
        curve = curve + best_of_runs(ORDERS, of_one, search.mean_runs, shape)
    return curve


def _visible(noise_multiplier: float, sample_rate: float) -> np.ndarray:
    """Return the curve of one sample in which an example visibly takes part with probability q.

    Given that it takes part, its loss is a Gaussian's, so the curve is
    ``log E[exp((a - 1) loss)] / (a - 1) = log(1 - q + q exp(a (a - 1) / (2 sigma^2))) / (a - 1)``.
    """
    orders = np.asarray(ORDERS)
    moment = orders * (orders - 1) / (2 * noise_multiplier**2)
    if sample_rate == 1:
        return moment / (orders - 1)
    # Where the exponential is small, log1p(q expm1(moment)): beside 1 a rate of 1e-9 would be lost.
    near = np.log1p(sample_rate * np.expm1(np.minimum(moment, 1.0)))
    far = np.logaddexp(math.log1p(-sample_rate), math.log(sample_rate) + moment)
    return np.where(moment <= 1, near, far) / (orders - 1) + ROUNDING_ALLOWANCE


@lru_cache(maxsize=64)
def _curve(noise_multiplier: float, sample_rate: float) -> np.ndarray:
    """Return an upper bound on the Renyi divergence of one step at each of ORDERS, read-only;
    infinite where it cannot be computed."""
    divergences = log_moments(noise_multiplier, sample_rate) / (np.asarray(ORDERS) - 1)
    # An order that overflowed to NaN bounds nothing, so it becomes infinite.
    curve = (
        np.where(np.isnan(divergences), np.inf, np.maximum(divergences, 0.0)) + ROUNDING_ALLOWANCE
    )
    curve.setflags(write=False)
    return curve


def log_moments(noise_multiplier: float, sample_rate: float) -> np.ndarray:
    """Return log A_a of one step for each of ORDERS, infinity where its series does not converge.

    Args: sample_rate: in (0, 1).
    """
    orders = np.asarray(ORDERS)
    whole = np.isin(orders, _WHOLE)
    found = np.empty(len(ORDERS))
    found[whole] = _finite_sums(noise_multiplier, sample_rate)
    found[~whole] = _series(noise_multiplier, sample_rate, orders[~whole], _FEW_TERMS)
    left = np.isinf(found)
    found[left] = _series(noise_multiplier, sample_rate, orders[left], MOST_TERMS)
    return found


def _log_binomial(n: np.ndarray, k: np.ndarray) -> np.ndarray:
    result: np.ndarray = gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)
    return result


# Order, k and log of the binomial coefficient for each term of all finite sums; where each begins.
_WHOLE = [int(order) for order in ORDERS if order.is_integer()]
_N = np.concatenate([np.full(n + 1, float(n)) for n in _WHOLE])
_K = np.concatenate([np.arange(n + 1.0) for n in _WHOLE])
_BINOMIALS = _log_binomial(_N, _K)
_BEGINS = np.cumsum([0, *(n + 1 for n in _WHOLE[:-1])])


def _finite_sums(sigma: float, rate: float) -> np.ndarray:
    terms = _BINOMIALS + _K * math.log(rate) + (_N - _K) * math.log1p(-rate)
    terms += (_K * _K - _K) / (2 * sigma**2)
    largest = np.maximum.reduceat(terms, _BEGINS)
    counts = np.diff([*_BEGINS, len(terms)])
    sums = np.add.reduceat(np.exp(terms - np.repeat(largest, counts)), _BEGINS)
    result: np.ndarray = largest + np.log(sums)
    return result


def _series(sigma: float, rate: float, orders: np.ndarray, count: int) -> np.ndarray:
    """Return log A_a of fractional orders, the sum of two series, integrals up to z0 and from z0
    on; infinity where they have not converged after ``count`` terms.

    An order has converged at the first term at which both series fall and both terms are
    negligible.
    """
    log_rate, log_rest, variance = math.log(rate), math.log1p(-rate), sigma**2
    z0 = variance * math.log(1 / rate - 1) + 0.5
    i = np.arange(count, dtype=float)
    j = orders[:, None] - i
    log_binomial = _log_binomial(orders[:, None], i)
    below = log_binomial + i * log_rate + j * log_rest + (i * i - i) / (2 * variance)
    above = log_binomial + j * log_rate + i * log_rest + (j * j - j) / (2 * variance)
    # erfc(x / sqrt(2)) / 2 is the normal distribution's lower tail at -x.
    series = np.stack([below + log_ndtr((z0 - i) / sigma), above + log_ndtr((j - z0) / sigma)])
    total = np.logaddexp(*np.logaddexp.accumulate(series, axis=2))
    falling = np.zeros(total.shape, bool)
    falling[:, 1:] = (series[:, :, 1:] < series[:, :, :-1]).all(axis=0)
    done = falling & (series.max(axis=0) < total - _NEGLIGIBLE)
    at_end = np.take_along_axis(total, done.argmax(axis=1)[:, None], axis=1)[:, 0]
    result: np.ndarray = np.where(done.any(axis=1), at_end, np.inf)
    return result
