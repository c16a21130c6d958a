"""Epsilons that a plain FFT on a fixed grid would hide: those at small deltas, and of small rates.

*Small deltas.* An FFT leaves errors of about 1e-16 in each probability, which add up to 1e-9 and
more over a grid: as much as a small delta itself. So the distributions are tilted first: each
probability is multiplied by exp(lambda loss) and divided by their sum M. The composition of tilted
distributions is the tilted composition, most of which now lies near the epsilon that is sought.
Tilting back, by exp(sum T log M - lambda loss), makes the errors as small as delta is.

*Small rates.* At rate 1e-8 most losses of a step are of size 1e-8, and dp-accounting 0.6 is too
coarse for that. Moving losses to a grid adds up to the loss times the interval to the variance of
each step. With noise 1 and delta 1e-6, epsilon after 10^6 steps is 1.4e-5; on the grid of 1e-4 it
becomes 2.4e-3, and 1.8e-5 on one of 2e-8. On a finer one dp-accounting raises ("a must be greater
than b"): two outcomes have losses that it cannot tell apart. Its probabilities are differences of
deltas, which lose 1e-16 each. Here they are integrals, whose terms are all positive, and the grid
follows epsilon.

The result is an upper bound, without a slack:

- Losses move to the points of the grid by the connect-the-dots rule, which makes delta larger at
  every epsilon, and so that of a composition.
- What is not integrated counts: very large losses and outcomes 12 standard deviations off as an
  infinite loss, very small losses as larger ones.
- Rounding by Fourier transforms and the tails that they wrap are absolute errors. They are bounded
  and taken off delta.
- All other rounding is relative, since all terms of sums are positive. Exponents are below 1000
  where they matter, so a step's probability is wrong by less than 1e-12 of itself, and that of 10^6
  steps by less than 1e-6. Losses are wrong by 1e-14 of themselves, which moves epsilon by 1e-11 of
  itself, and so delta by less than 1e-9. _ROUNDING is more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as google_pld
from scipy import fft
from scipy.optimize import minimize_scalar
from scipy.special import ndtr, ndtri

from hf_dp.accounting.events import PoissonSampledGaussian
from hf_dp.accounting.grid import directions, log_power, on_grid

_TAIL = 1e-16  # of the tilted composition, beyond each end of the grid
_ROUNDING = 1e-5  # of delta
_LOST = 1e-4  # of delta, over all steps: the largest losses, counted as infinite
_LOWEST = -12.0  # standard deviations of the noise
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)

# Where a grid four times finer gains less than this of epsilon, the next gains a third of it or
# less.
_GAIN = 0.1
_CLOSER = 0.999  # a bound this much closer is worth another tilt
_MAX_POINTS = 2**19  # of one step


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
        probability of _TAIL at most, by the best of several Chernoff bounds."""
        start, found = self.log_moment(tilt), math.inf
        p = self.tilted(tilt)
        variance = float(p @ (self.losses - float(p @ self.losses)) ** 2)
        spread = math.sqrt(times * variance) + self.interval
        for further in np.geomspace(0.3, 300, 40) / spread:
            log_moment = self.log_moment(tilt + sign * further) - start
            found = min(found, (times * log_moment - math.log(_TAIL)) / further)
        return sign * math.ceil(found / self.interval)


# The losses of one step under removal and under addition, and the number of steps.
Steps = tuple[Sequence[Loss], int]


def epsilon_at(steps: Sequence[Steps], delta: float, about: float) -> float:
    """Return an upper bound on the epsilon >= 0 at which all steps have ``delta`` in both
    directions.

    It is infinity above ``about``, where the search begins, also because rounding may be as large
    as delta, or infinite losses alone are more likely.

    Args: steps: pessimistic, on one grid.
    """
    found = 0.0
    for way in range(2):
        if math.isfinite(found):
            parts = [(losses[way], times) for losses, times in steps]
            found = _one_way(parts, delta * (1 - _ROUNDING), found, about)
    return found


def _one_way(parts: list[tuple[Loss, int]], delta: float, least: float, best: float) -> float:
    """Return an upper bound on epsilon in one direction, but at least ``least``; infinity where it
    is above ``best``."""
    infinite = -math.expm1(sum(times * math.log1p(-loss.infinite) for loss, times in parts))

    def log_moment(log_tilt: float) -> float:
        return sum(times * loss.log_moment(math.exp(log_tilt)) for loss, times in parts)

    # Any tilt gives a bound. With the one that is best for epsilon, rounding matters least.
    log_tilt = minimize_scalar(
        lambda log_tilt: log_moment(log_tilt) - math.exp(log_tilt) * best,
        bounds=(math.log(1e-3 / best), math.log(1e3 / best)),
        method="bounded",
    ).x
    tilt, scale, interval = math.exp(log_tilt), log_moment(log_tilt), parts[0][0].interval
    lowest, composed, error = _composed(parts, tilt)
    losses = (np.arange(len(composed)) + lowest) * interval

    def weight(loss: np.ndarray) -> np.ndarray:
        """Return by what a tilted probability is multiplied; e^700 is too much anywhere."""
        return np.exp(np.minimum(scale - tilt * loss, 700.0))

    masses = np.maximum(composed, 0.0) * weight(losses)
    # Each point is wrong by `error` at most. One that is x above epsilon counts by f(x) =
    # exp(-tilt x) (1 - exp(-x)), relative to the weight at epsilon. As f rises and then falls, its
    # sum over the points is at most its integral / interval + its maximum.
    points = (1 / (tilt * interval) + 1) / (tilt + 1)
    wrong = error * points + len(parts) * _TAIL

    def exceeds(epsilon: float) -> bool:
        above = slice(int(np.searchsorted(losses, epsilon)), None)
        finite = float(masses[above] @ -np.expm1(epsilon - losses[above]))
        return finite + wrong * float(weight(np.array(epsilon))) + infinite > delta

    if exceeds(best):
        return math.inf
    if not exceeds(least):
        return least
    low, high = least, best
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if exceeds(middle) else (low, middle)
    return high


def _composed(parts: list[tuple[Loss, int]], tilt: float) -> tuple[int, np.ndarray, float]:
    """Return the first point, the tilted composition, and a bound on each point's error.

    With the coefficients z of all losses but the most likely one, whose sum is ``rest``, those of a
    step are 1 - rest + z, and only z is rounded: by at most 8 log2(n) units of ``rest`` in a
    Fourier transform of length n (Higham 2002, Accuracy and Stability, section 24.1: each input
    reaches each output on one path of factors of size 1). The product of T coefficients f has up to
    T |f|^(T - 1) times that; its own rounding is of the same form, and smaller. The inverse
    transform takes means over all coefficients. (At small rates ``rest`` is small.)
    """
    low = sum(loss.end(tilt, times, -1) for loss, times in parts)
    high = sum(loss.end(tilt, times, 1) for loss, times in parts)
    length = fft.next_fast_len(max(high - low + 1, *(len(loss.losses) for loss, _ in parts)))
    unit = 8 * math.log2(length) * float(np.finfo(float).eps)
    first, moved = 0, 2.0
    logs, sizes = np.zeros(length // 2 + 1, complex), np.zeros(length // 2 + 1)
    for loss, times in parts:
        others = np.zeros(length)
        others[: len(loss.losses)] = loss.tilted(tilt)
        most = int(others.argmax())
        others[most] = 0.0
        rest = float(others.sum())
        z = fft.rfft(np.roll(others, -most)) - rest
        logs += log_power(z, times)
        sizes += (times - 1) * np.log(np.minimum(np.abs(1 + z) + unit, 1.0))
        first += times * (loss.lowest + most)
        moved += times * rest
    composed = fft.irfft(np.exp(logs), length)
    error = unit * moved * float(np.exp(sizes).mean())
    return low, np.roll(composed, first - low)[: high - low + 1], error


def of_distributions(
    parts: Sequence[tuple[google_pld.PrivacyLossDistribution, int]], delta: float, about: float
) -> float:
    """Return :func:`epsilon_at` of distributions on one grid, each with the number of its steps."""
    steps = []
    for distribution, times in parts:
        losses = [Loss(pmf) for pmf in directions(distribution)]
        steps.append(((losses[0], losses[-1]), times))
    found = epsilon_at(steps, delta, about)
    # Where losses have heavy tails, the bound to begin with is far above epsilon, and so is the
    # tilt that is best for it. At the epsilon just found another one is better.
    while 0 < found < _CLOSER * about:
        about, found = found, min(found, epsilon_at(steps, delta, found))
    return found


def of_small_rates(events: Sequence[PoissonSampledGaussian], delta: float, about: float) -> float:
    """Return an upper bound on epsilon, at most ``about``, of Poisson-sampled Gaussians (a rate may
    be 1), on grids that become finer until it no longer falls."""
    lost = _LOST * delta / sum(event.steps for event in events)
    best, interval, before, points = about, about / 256, math.inf, 0
    while best > 0 and 4 * points <= _MAX_POINTS:
        steps = [
            (one_step(event.noise_multiplier, event.sample_rate, interval, lost), event.steps)
            for event in events
        ]
        found = epsilon_at(steps, delta, best)
        best = min(best, found)
        if found > before * (1 - _GAIN):
            break
        points = max(len(removal.losses) for (removal, _), _ in steps)
        interval = max(min(interval / 4, best / 256), interval * points / _MAX_POINTS)
        before = found
    return best


def one_step(
    noise_multiplier: float, sample_rate: float, interval: float, lost: float
) -> tuple[Loss, Loss]:
    """Return the losses of one step under removal and under addition, pessimistic, on a grid.

    Args: lost: the probability of the largest losses, which becomes that of an infinite loss.
    """
    sigma, rate = noise_multiplier, sample_rate
    highest = max(-sigma * ndtri(lost / 2), 1 - sigma * ndtri(min(0.5, lost / 2 / rate)))
    lowest = _LOWEST * sigma

    def loss(x: np.ndarray) -> np.ndarray:
        exponent = (x - 0.5) / sigma**2
        return exponent if rate == 1 else np.log1p(rate * np.expm1(exponent))

    # Gauss's rule with 8 nodes is exact to rounding between outcomes that are at most sigma / 8
    # apart, on which the rule below has no bend.
    low, high = np.floor(loss(np.array([lowest, highest])) / interval)
    bends = np.arange(low + 1, high + 1) * interval
    if rate < 1:
        bends = np.expm1(bends) / rate
        bends = np.log1p(bends[bends > -1])
    bends = sigma**2 * bends + 0.5
    edges = np.concatenate([np.arange(lowest, highest, sigma / 8), [highest], bends])
    edges = np.unique(np.clip(edges, lowest, highest))
    half = np.diff(edges)[:, None] / 2
    x = edges[:-1, None] + half * (1 + _NODES)
    losses, measure = loss(x), half * _WEIGHTS / (sigma * math.sqrt(2 * math.pi))
    without = measure * np.exp(-0.5 * (x / sigma) ** 2)
    taking_part = measure * np.exp(-0.5 * ((x - 1) / sigma) ** 2)
    below, above = ndtr(_LOWEST), ndtr(-highest / sigma)
    beyond = (1 - rate) * above + rate * ndtr((1 - highest) / sigma)
    first, remove = _on_grid(losses, (1 - rate) * without + rate * taking_part, interval)
    removal = pld_pmf.DensePLDPmf(interval, first, remove, float(below + beyond), True)
    first, add = _on_grid(-losses, without, interval)
    add[1] += above  # of losses further below 0
    addition = pld_pmf.DensePLDPmf(interval, first, add, float(below), True)
    return Loss(removal), Loss(addition)


def _on_grid(
    losses: np.ndarray, probabilities: np.ndarray, interval: float
) -> tuple[int, np.ndarray]:
    """Return the first point of the grid and the probabilities of all, by the connect-the-dots rule
    (Doroshenko et al. 2022, arXiv 2207.04380).

    It is linear: a loss l between the points a and b = a + interval adds
    ``(1 - exp(a - l)) / (1 - exp(a - b))`` of its probability to b and the rest to a. So delta is
    the same at each point; between two, it is linear in exp(epsilon), and true deltas are convex.
    """
    points = np.floor(losses / interval)
    shares = np.clip(np.expm1(points * interval - losses) / math.expm1(-interval), 0.0, 1.0)
    at = (points - points.min()).astype(np.int64).ravel()
    found = np.bincount(at, (probabilities * (1 - shares)).ravel(), at.max() + 2)
    found[1:] += np.bincount(at, (probabilities * shares).ravel())
    return int(points.min()), found
