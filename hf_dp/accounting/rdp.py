"""Renyi accounting with Google's ``dp-accounting``: an upper bound with no grid and no limit on delta.

The curve of the Poisson-sampled Gaussian is Mironov, Talwar, Zhang 2019 (arXiv 1908.10530), section 3.3: integer
orders exact, fractional orders bounded from above (dp-accounting adds the terms of the series without their signs; up
to 0.5 % in the curve, 0.2 % in epsilon). Curves add up over steps and events. Conversion to epsilon: Canonne, Kamath,
Steinke 2020 (arXiv 2004.00010), Proposition 12.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np
from dp_accounting import dp_event
from dp_accounting.rdp import rdp_privacy_accountant as google_rdp

from hf_dp.accounting.composition import Composition
from hf_dp.accounting.ranges import Range
from hf_dp.accounting.value import Epsilon

ORDERS = tuple(float(order) for order in google_rdp.DEFAULT_RDP_ORDERS)

# The bound is a theorem everywhere; these limits keep its floating-point evaluation away from overflow and from sums
# in which one step's divergence (about rate^2 / noise^2) is lost beside 1 (checked against quadrature well inside).
RANGE = Range(
    "rdp",
    min_noise_multiplier=0.01,
    max_noise_multiplier=1000.0,
    min_sample_rate=1e-8,
    max_steps=10**9,
    min_delta=1e-100,
    next_move="Use a larger noise multiplier, or fewer steps; no accountant of hf_dp covers this range.",
)

# Added to each order's divergence for each step. log A_order is a sum near 0 for weak mechanisms, whose rounding error
# (below 1e-12, divided by order - 1 >= 0.1) may leave it too small or even negative; dp-accounting would report
# epsilon 0 for a negative one. At 1e6 steps the allowance costs 1e-5 of epsilon.
ROUNDING_ALLOWANCE = 1e-11


@contextmanager
def _quiet() -> Iterator[None]:
    """Drops one warning a progress bar would repeat: a series that does not converge only removes its order."""

    def keep(record: logging.LogRecord) -> bool:
        return "failed to converge" not in str(record.msg)

    logger = logging.getLogger("absl")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


@lru_cache(maxsize=64)
def _curve(noise_multiplier: float, sample_rate: float) -> np.ndarray:
    """Upper bound of the Renyi divergence of one step at each of ORDERS (read-only; infinite where not computable)."""
    accountant = google_rdp.RdpAccountant(ORDERS)
    with _quiet():
        accountant.compose(dp_event.PoissonSampledDpEvent(sample_rate, dp_event.GaussianDpEvent(noise_multiplier)))
    # An order that overflowed to NaN bounds nothing: infinite.
    curve = np.where(np.isnan(accountant.rdp), np.inf, np.maximum(accountant.rdp, 0.0)) + ROUNDING_ALLOWANCE
    curve.setflags(write=False)
    return curve


def epsilon_and_order(composition: Composition, delta: float) -> tuple[float, float]:
    """The smallest epsilon over ORDERS and its order, without a range check (``pld``, ``prv`` use it too)."""
    curve = composition.gaussian_mu**2 / 2 * np.asarray(ORDERS)
    for term in composition.sampled:
        curve = curve + term.steps * _curve(term.noise_multiplier, term.sample_rate)
    value, order = google_rdp.compute_epsilon(ORDERS, curve, delta)
    return float(value), float(order)


def epsilon(composition: Composition, delta: float) -> Epsilon:
    """Upper bound on epsilon at ``delta``; AccountingRangeError outside RANGE."""
    if composition.empty or composition.noiseless:
        return Epsilon(math.inf if composition.noiseless else 0.0, "bound")
    RANGE.check(composition, delta)
    return Epsilon(epsilon_and_order(composition, delta)[0], "bound")
