"""Renyi accounting with Google's ``dp-accounting``: an upper bound without a grid, for any delta.

The curve of the Poisson-sampled Gaussian is from Mironov, Talwar, Zhang 2019 (arXiv 1908.10530),
section 3.3: integer orders are exact, and fractional orders are bounded from above (the terms of
the series are added without their signs; up to 0.5 % in the curve, 0.2 % in epsilon). Curves add up
over steps and events. The conversion to epsilon is from Canonne, Kamath, Steinke 2020 (arXiv
2004.00010), Proposition 12.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant as google_rdp
from scipy.optimize import brentq

from hf_dp.accounting.composition import Composition, ResponseTerm
from hf_dp.accounting.gaussian_mixture import response_losses
from hf_dp.accounting.ranges import Range
from hf_dp.accounting.sampled_curve import log_moments
from hf_dp.accounting.value import Epsilon

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


@lru_cache(maxsize=64)
def _curve(noise_multiplier: float, sample_rate: float) -> np.ndarray:
    """Return an upper bound on the Renyi divergence of one step at each of ORDERS.

    The array is read-only, and infinite where the divergence cannot be computed.
    """
    moments = log_moments(noise_multiplier, sample_rate, ORDERS)
    divergences = moments / (np.asarray(ORDERS) - 1)
    # An order that overflowed to NaN bounds nothing, so it becomes infinite.
    curve = (
        np.where(np.isnan(divergences), np.inf, np.maximum(divergences, 0.0)) + ROUNDING_ALLOWANCE
    )
    curve.setflags(write=False)
    return curve


def epsilon_and_order(composition: Composition, delta: float) -> tuple[float, float]:
    """Return the smallest epsilon over ORDERS and its order, without a range check.

    ``pld`` and ``prv`` also use it.
    """
    value, order = google_rdp.compute_epsilon(ORDERS, _total(composition), delta)
    return float(value), float(order)


def _total(composition: Composition) -> np.ndarray:
    """Return the curve of all events, which is the sum of theirs."""
    curve = composition.gaussian_mu**2 / 2 * np.asarray(ORDERS)
    for term in composition.sampled:
        curve = curve + term.steps * _curve(term.noise_multiplier, term.sample_rate)
    for seen in composition.visible:
        curve = curve + seen.steps * _visible(seen.noise_multiplier, seen.sample_rate)
    for response in composition.responses:
        curve = curve + response.steps * _response(response)
    for search in composition.searches:
        curve = curve + _best_of(_total(search.run), search.mean_runs, search.shape)
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


def _response(term: ResponseTerm) -> np.ndarray:
    orders = np.asarray(ORDERS)
    losses = [
        (orders - 1) * loss + log_probability for loss, log_probability in response_losses(term)
    ]
    return np.logaddexp.reduce(losses) / (orders - 1)


def _best_of(curve: np.ndarray, mean_runs: float, shape: float | None) -> np.ndarray:
    """Return the curve of the best of K runs with this curve (Papernot and Steinke 2021).

    All orders here are above 1. Poisson, Theorem 6: at order a with e = log(1 + 1/(a - 1)),
    ``curve(a) + mean delta(e) + log(mean) / (a - 1)``, where one run is (e, delta(e))-DP. Truncated
    negative binomial, Theorem 2: ``curve(a) + log(mean) / (a - 1) + (1 + shape) min over b of
    ((1 - 1/b) curve(b) - log(gamma) / b)``; since the theorem holds for every b, we take the
    minimum.
    """
    orders = np.asarray(ORDERS)
    base = curve + math.log(mean_runs) / (orders - 1)
    if shape is None:
        deltas = [
            google_rdp.compute_delta(orders, curve, math.log1p(1 / (order - 1)))[0]
            for order in ORDERS
        ]
        return base + mean_runs * np.asarray(deltas)
    finite = np.isfinite(curve)
    terms = (1 - 1 / orders[finite]) * curve[finite] - math.log(_gamma(mean_runs, shape)) / orders[
        finite
    ]
    best = base + (1 + shape) * float(terms.min(initial=math.inf))
    # Renyi divergence grows with its order, so a larger order's value bounds a smaller one's.
    return np.minimum.accumulate(best[::-1])[::-1]


def _gamma(mean_runs: float, shape: float) -> float:
    """Return the gamma in (0, 1) that gives the truncated negative binomial this mean (ibid.)."""

    # Definition 1: shape (1/gamma - 1) / (1 - gamma^shape), or its limit for shape 0; t is
    # log(1/gamma).
    def mean(t: float) -> float:
        return math.expm1(t) / (t if shape == 0 else -math.expm1(-shape * t) / shape)

    t = brentq(lambda t: mean(t) - mean_runs, 1e-15, 700.0, xtol=1e-14, rtol=1e-14)
    return math.exp(-float(t))


def epsilon(composition: Composition, delta: float, relation: str = "zero_out") -> Epsilon:
    """Return an upper bound on epsilon at ``delta``.

    Raises:
        AccountingRangeError: outside RANGE.
    """
    if composition.empty or composition.noiseless:
        return Epsilon(math.inf if composition.noiseless else 0.0, "bound")
    RANGE.check(composition, delta)
    return Epsilon(epsilon_and_order(composition, delta)[0], "bound")
