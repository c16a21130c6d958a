"""The epsilon of composed privacy-loss distributions at deltas that plain FFT rounding would hide.

An FFT leaves errors of about 1e-16 in each probability, which add up to 1e-9 and more over a grid:
as much as a small delta itself. So the distributions are tilted first: each probability is
multiplied by exp(lambda loss) and divided by their sum M. The composition of tilted distributions
is the tilted composition, most of which now lies near the epsilon that is sought. Tilting back, by
exp(sum T log M - lambda loss), makes the errors as small as delta is. What is left of them is
bounded and taken off delta.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as google_pld
from scipy import fft
from scipy.optimize import minimize_scalar

from hf_dp.accounting.grid import directions, on_grid

TAIL = 1e-16  # of the tilted composition, beyond each end of the grid
_ORDERS = np.geomspace(1e-3, 1e3, 120)
_UNIT = 2.0**-52

Parts = Sequence[tuple[google_pld.PrivacyLossDistribution, int]]
_Pmfs = list[tuple["Loss", int]]


class Loss:
    """One step's finite losses, their log-probabilities, and the probability of an infinite one."""

    def __init__(self, pmf: pld_pmf.PLDPmf):
        grid = on_grid(pmf)
        self.lowest, self.interval, self.infinite = grid.lowest, grid.interval, grid.infinite
        self.losses = grid.losses
        with np.errstate(divide="ignore"):
            self.log_p = np.log(grid.probabilities)

    def log_moment(self, tilt: float) -> float:
        """Return log of the sum of p exp(tilt loss)."""
        exponents = self.log_p + tilt * self.losses
        top = exponents.max()
        return float(top + np.log(np.exp(exponents - top).sum()))

    def tilted(self, tilt: float) -> np.ndarray:
        """Return the tilted probabilities; their sum is 1."""
        return np.exp(self.log_p + tilt * self.losses - self.log_moment(tilt))

    def end(self, tilt: float, times: int, sign: int) -> int:
        """Return a point of the grid beyond which the sum of so many tilted losses lies with a
        probability of TAIL at most, by the best of several Chernoff bounds."""
        start, found = self.log_moment(tilt), math.inf
        spread = math.sqrt(times * self._variance(tilt)) + self.interval
        for further in np.geomspace(0.3, 300, 40) / spread:
            log_moment = self.log_moment(tilt + sign * further) - start
            found = min(found, (times * log_moment - math.log(TAIL)) / further)
        return sign * math.ceil(found / self.interval)

    def _variance(self, tilt: float) -> float:
        p = self.tilted(tilt)
        mean = float(p @ self.losses)
        return float(p @ (self.losses - mean) ** 2)


def epsilon_at(parts: Parts, delta: float) -> float:
    """Return the smallest epsilon >= 0 at which the composition has at most ``delta``, in both
    directions; infinity where infinite losses alone are more likely.

    Args:
        parts: distributions on one grid, pessimistic, each with the number of its steps.
        delta: > 0.
    """
    both = [(directions(loss), times) for loss, times in parts]
    ways = range(max(len(found) for found, _ in both))
    return max(
        _one_way([(Loss(found[min(way, len(found) - 1)]), times) for found, times in both], delta)
        for way in ways
    )


def _one_way(parts: _Pmfs, delta: float) -> float:
    infinite = -math.expm1(sum(times * math.log1p(-loss.infinite) for loss, times in parts))
    finite = delta - infinite
    if finite <= 0:
        return math.inf

    def by_chernoff(log_tilt: float) -> float:
        tilt = math.exp(log_tilt)
        moments = sum(times * loss.log_moment(tilt) for loss, times in parts)
        return (moments - math.log(finite)) / tilt

    found = _at_tilt(parts, finite, _best(by_chernoff))
    if not math.isfinite(found):
        return found
    # Where losses have heavy tails, Chernoff's bound is far above epsilon, and so is the tilt that
    # is best for it. At the epsilon just found another one is better.
    again = _at_tilt(parts, finite, _best(lambda log_tilt: _log_weight(parts, log_tilt, found)))
    return min(found, again)


def _log_weight(parts: _Pmfs, log_tilt: float, epsilon: float) -> float:
    tilt = math.exp(log_tilt)
    return sum(times * loss.log_moment(tilt) for loss, times in parts) - tilt * epsilon


def _best(cost: Callable[[float], float]) -> float:
    """Return the tilt whose logarithm has the least cost."""
    around = min(np.log(_ORDERS), key=cost)
    edges = (around - 0.2, around + 0.2)
    return math.exp(minimize_scalar(cost, bounds=edges, method="bounded").x)


def _at_tilt(parts: _Pmfs, finite: float, tilt: float) -> float:
    """Return an upper bound on the epsilon at which finite losses have this delta; infinity where
    rounding may be as large."""
    lowest, composed, error = _composed(parts, tilt)
    interval = parts[0][0].interval
    scale = sum(times * loss.log_moment(tilt) for loss, times in parts)

    def weight(epsilon: float) -> float:
        """Return by what a tilted probability at this loss is multiplied."""
        return math.exp(min(scale - tilt * epsilon, 700.0))

    losses = (np.arange(len(composed)) + lowest) * interval
    found = _solved(losses, composed, scale - tilt * losses, finite)
    # Each point above epsilon is wrong by `error` at most, and its weight falls by exp(-tilt
    # interval) from point to point. A larger epsilon has a smaller sum of these.
    wrong = weight(found) * (error / -math.expm1(-tilt * interval) + 3 * TAIL)
    if wrong >= finite:
        return math.inf
    return _solved(losses, composed, scale - tilt * losses, finite - wrong)


def _composed(parts: _Pmfs, tilt: float) -> tuple[int, np.ndarray, float]:
    """Return the first point, the tilted composition, and a bound on each point's error.

    A Fourier transform of length n in double precision has a relative error of at most 8 log2(n)
    units of rounding in the 2-norm (Higham 2002, Accuracy and Stability, section 24.1). Its T-th
    power has T times that, since no coefficient of a distribution is above 1, and a few T units of
    its own. A point's error is at most the 2-norm's, and a distribution's is at most 1.
    """
    low = sum(loss.end(tilt, times, -1) for loss, times in parts)
    high = sum(loss.end(tilt, times, 1) for loss, times in parts)
    length = fft.next_fast_len(max(high - low + 1, *(len(loss.losses) for loss, _ in parts)))
    transformed = np.ones(length // 2 + 1, complex)
    for loss, times in parts:
        transformed *= fft.rfft(loss.tilted(tilt), length) ** times
    composed = fft.irfft(transformed, length)
    first = sum(times * loss.lowest for loss, times in parts)
    steps = sum(times for _, times in parts)
    error = 8 * math.log2(length) * _UNIT * (steps + 2)
    return low, np.roll(composed, first - low)[: high - low + 1], error


def _solved(losses: np.ndarray, tilted: np.ndarray, log_weights: np.ndarray, delta: float) -> float:
    """Solve ``delta = sum over losses above epsilon of P (1 - exp(epsilon - loss))`` from the
    largest loss down, as in :func:`hf_dp.accounting.grid.epsilon_at`; 0 for a smaller epsilon."""
    above = losses > 0
    losses, tilted, log_weights = losses[above][::-1], tilted[above][::-1], log_weights[above][::-1]
    if not len(losses):
        return 0.0
    # In units of delta, so that nothing overflows before the end is reached.
    with np.errstate(over="ignore"):
        masses = np.maximum(tilted, 0.0) * np.exp(log_weights - math.log(delta))
        upper = np.concatenate([[0.0], masses.cumsum()])
        lower = np.concatenate([[0.0], (masses * np.exp(-losses)).cumsum()])
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        epsilons = np.where(upper > 1, np.log((upper - 1) / lower), -math.inf)
    ends = np.nan_to_num(epsilons[:-1], nan=math.inf) >= losses
    if ends.any():
        first = int(ends.argmax())
        return float(min(epsilons[first], losses[max(0, first - 1)]))
    return max(0.0, float(epsilons[-1]))
