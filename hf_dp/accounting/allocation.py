"""The privacy-loss distribution of one random allocation: each example in one of t steps.

With the example, the outcomes of the t steps have the density P = the mean over i of
N(e_i, sigma^2 I), without it Q = N(0, sigma^2 I), also when each step is chosen after the outcomes
before it (Chua et al. 2025, arXiv 2412.16802, "balls and bins"; Feldman and Shenfeld 2025, arXiv
2502.08202). The likelihood ratio S = P / Q is the mean of t numbers W, under Q independent and
lognormal with mean 1. In both directions the loss of privacy is the mean of a convex function of S:

    P(A) - exp(epsilon) Q(A)  <=  E_Q max(0, S - exp(epsilon)),
    Q(A) - exp(epsilon) P(A)  <=  E_Q max(0, 1 - exp(epsilon) S).

So each W may be moved to the two nearest points of a grid in a way that keeps its mean: that makes
every such mean larger (Jensen), never smaller. On the grid the distribution of the sum is a power
of one Fourier transform. The result is an upper bound for every grid; a finer one is closer.
"""

from __future__ import annotations

import math

import numpy as np
from dp_accounting.pld import privacy_loss_distribution as google_pld
from scipy import fft
from scipy.special import ndtr, ndtri

from hf_dp.accounting.one_step import losses_of

_BEYOND = 1e-11  # of P's probability that one W is too large for the grid; it counts as lost
_POINTS = 1 << 21  # of the grid of the sum, at most
_LARGE = 256  # points: a W beyond is large
_SPACING = 1e-3  # of W, or more where that many points do not suffice
_UNIT = 2.0**-52


def allocated(
    noise_multiplier: float, steps: int, interval: float
) -> google_pld.PrivacyLossDistribution:
    """Return the distribution of all ``steps`` steps, >= 2, of one allocation, in both directions,
    pessimistic; ``interval`` is between two losses."""
    ratio = _Ratio(noise_multiplier, steps)
    low = math.floor(math.log(ratio.smallest) / interval)
    high = math.ceil(math.log(ratio.largest) / interval)
    points = np.arange(low, high + 1) * interval
    removal = np.clip(ratio.removal(points), 0.0, 1.0)
    addition = np.clip(ratio.addition(-points[::-1]), 0.0, 1.0)
    return google_pld.PrivacyLossDistribution(
        losses_of(removal, interval, low), losses_of(addition, interval, -high)
    )


class _Ratio:
    """The likelihood ratio S under P and under Q, on a grid; ``lost`` bounds what is left out of
    either.

    Little noise makes some W so large that one grid for all is too coarse for the small ones. So
    outcomes without a large W get a finer grid of their own. Given which W are large, they are
    still independent, and Jensen's inequality holds for each choice of them.
    """

    def __init__(self, noise_multiplier: float, steps: int):
        mu = 1 / noise_multiplier
        top = math.exp(mu * mu / 2 - mu * ndtri(_BEYOND))  # the largest W on the grid
        room = steps + 4 * top + 12 * math.sqrt(steps * math.expm1(mu * mu))
        spacing = max(_SPACING, room / _POINTS)
        points = np.arange(math.ceil(top / spacing) + 1) * spacing
        weights = _lognormal(mu, points)
        large = min(_LARGE, len(points) - 1)  # from this point on
        small = _lognormal(mu, points[: large + 1], beyond=False)
        fine = max(_SPACING, steps * points[large] / _POINTS)
        grids = [_Sum(weights, spacing, steps, room)]
        if 4 * fine < spacing:
            count = math.ceil(points[large] / fine)  # the last point may lie beyond it
            fine = float(points[large]) / count
            without = _lognormal(mu, np.arange(count + 1) * fine, beyond=False)
            apart = _Sum(small, spacing, steps, room, length=grids[0].length)
            grids[0].leave_out(apart)
            grids.append(_Sum(without, fine, steps, steps * points[large] + fine))
        self.lost = _BEYOND + _wrapped(weights, points, steps, room)
        self.lost += sum(grid.rounding for grid in grids)
        s = np.concatenate([np.arange(grid.length) * (grid.spacing / steps) for grid in grids])
        with_it = np.concatenate([grid.with_it for grid in grids])
        without_it = np.concatenate([grid.without for grid in grids])
        order = np.argsort(s, kind="stable")
        order = order[(with_it[order] > 0) | (without_it[order] > 0)]
        self._s = s[order]
        self._with, self._without = (np.maximum(each[order], 0.0) for each in (with_it, without_it))
        up, down = np.cumsum(self._without), np.cumsum(self._with[::-1])
        least = min(grid.spacing for grid in grids) / steps
        self.smallest = float(max(self._s[np.searchsorted(up, self.lost)], least))
        self.largest = float(self._s[-1 - np.searchsorted(down, self.lost)])

    def removal(self, epsilons: np.ndarray) -> np.ndarray:
        """Return E_P max(0, 1 - exp(epsilon) / S), and what was left out."""
        positive = self._s > 0
        s, p = self._s[positive], self._with[positive]
        above = _above(p), _above(p / s)
        first = np.searchsorted(s, np.exp(epsilons), side="right")
        return above[0][first] - np.exp(epsilons) * above[1][first] + self.lost

    def addition(self, epsilons: np.ndarray) -> np.ndarray:
        """Return E_Q max(0, 1 - exp(epsilon) S), and what was left out."""
        below = [
            np.concatenate([[0.0], np.cumsum(q)]) for q in (self._without, self._without * self._s)
        ]
        first = np.searchsorted(self._s, np.exp(-epsilons), side="left")
        return below[0][first] - np.exp(epsilons) * below[1][first] + self.lost


def _above(values: np.ndarray) -> np.ndarray:
    """Return the sums of the values from each place on, and 0 for none."""
    return np.concatenate([np.cumsum(values[::-1])[::-1], [0.0]])


class _Sum:
    """The sum of t numbers W on 0, h, 2 h, ..., by one Fourier transform with room for ``room``.

    Args: weights: Q's probabilities of W. spacing: h. steps: t.

    Attributes: without, with_it: Q's and P's probabilities of the sum. rounding: what rounding may
        have taken from either.
    """

    def __init__(
        self,
        weights: np.ndarray,
        spacing: float,
        steps: int,
        room: float,
        length: int | None = None,
    ):
        needed = max(math.ceil(room / spacing) + 1, len(weights))
        self.length = length or fft.next_fast_len(needed, real=True)
        self.spacing = spacing
        weighted = weights * (np.arange(len(weights)) * spacing)
        of_one = fft.rfft(weights, self.length)
        others = of_one ** (steps - 1)
        self.without = fft.irfft(others * of_one, self.length)
        # E_Q[S g(S)] = E_Q[W_1 g(S)]: under P one of the W is weighted by itself. Computed so, and
        # not as S times Q, rounding errors are not multiplied by large S.
        self.with_it = fft.irfft(others * fft.rfft(weighted, self.length), self.length)
        # ||error||_1 <= sqrt(n) ||error||_2, and a transform errs by less than log2(n) units of the
        # last place in the root mean square (Higham 2002, section 24.1); t of them are multiplied.
        norm = max(float(np.linalg.norm(weights)), float(np.linalg.norm(weighted)))
        root, log = math.sqrt(self.length), math.log2(self.length)
        self.rounding = (steps + 2) * root * log * _UNIT * norm

    def leave_out(self, part: _Sum) -> None:
        """Take outcomes away that have a grid of their own."""
        self.without -= part.without
        self.with_it -= part.with_it
        self.rounding += part.rounding


def _lognormal(mu: float, points: np.ndarray, beyond: bool = True) -> np.ndarray:
    """Return probabilities of W = exp(mu z - mu^2 / 2), z normal, on points 0, h, 2 h, ...; a value
    between two goes to both, so that its mean stays.

    Args: beyond: whether larger W count.
    """
    spacing = float(points[1])
    with np.errstate(divide="ignore"):
        z = np.log(points) / mu + mu / 2  # W is at a point where its normal number is z
    mass, mean = _between(z), _between(z - mu)  # E[W; a < W < b] is a probability under N(mu, 1)
    upper = np.clip(mean / spacing - np.arange(len(mass)) * mass, 0.0, mass)
    probabilities = np.zeros(len(points))
    probabilities[1:] += upper
    probabilities[:-1] += mass - upper
    if beyond:
        probabilities[-1] += float(ndtr(-z[-1]))
    return probabilities


def _between(z: np.ndarray) -> np.ndarray:
    """Return a normal number's probabilities between neighbors, from the side of the nearer tail,
    where differences are exact to many digits."""
    return np.where(z[1:] > 0, -np.diff(ndtr(-z)), np.diff(ndtr(z)))


def _wrapped(weights: np.ndarray, values: np.ndarray, steps: int, room: float) -> float:
    """Bound P's and Q's probability that the sum of all W does not fit, which the transform would
    add elsewhere: by Chernoff, for the best of several exponents."""
    best = 1.0
    for exponent in np.geomspace(1, 60, 40) / values[-1]:
        grown = weights * np.exp(exponent * values)
        log_with = (steps - 1) * math.log(grown.sum()) + math.log(float(grown @ values))
        log_without = steps * math.log(grown.sum())
        best = min(best, math.exp(min(0.0, max(log_with, log_without) - exponent * room)))
    return best
