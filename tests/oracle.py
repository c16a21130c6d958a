"""An epsilon computed in a way that no accountant of the library shares: one tilted FFT of exact
cell masses.

The privacy loss of a Poisson-sampled Gaussian, ``L(x) = log((1 - q) + q exp((2 x - 1) / (2
sigma^2)))`` with x from the mixture (one record more than in the other data set; the worse
direction for these mechanisms), is put on a grid: each cell's mass from the normal distribution's
tails, half of it at either edge, and the sum's mean corrected to the exact one. Masses are tilted
by ``exp(s L)`` (Esscher), s the Chernoff optimum for delta, so that the composed mass of interest
lies in the middle of the FFT's range and not in its rounding noise; after composition the tilt is
undone:

    delta(eps) = sum over l > eps of  tilted(l) exp(T K(s) - s l) (1 - exp(eps - l)).

An estimate, not a bound: its grid error is below 1e-4 on everything that is tested.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import brentq, minimize_scalar
from scipy.special import log_ndtr, ndtr

Mechanism = tuple[float, float, int]  # noise multiplier, sample rate, steps

_REACH = 12.0  # standard deviations of the normal distribution that are kept


def epsilon(mechanisms: Sequence[Mechanism], delta: float, width: float | None = None) -> float:
    """Epsilon of all mechanisms together at ``delta``. Args: width: of a grid cell; None for one
    that is fine enough."""
    mechanisms = [each for each in mechanisms if each[1] > 0 and each[2] > 0]
    if not mechanisms:
        return 0.0
    if width is None:
        total = sum(steps for _, _, steps in mechanisms)
        # Fine beside what all steps add up to, and beside what one step's loss is.
        width = min(
            2e-3 / math.sqrt(total), *(_moments(sigma, q)[1] / 50 for sigma, q, _ in mechanisms)
        )
    cells = [_cells(sigma, q, width) for sigma, q, _ in mechanisms]
    counts = [steps for _, _, steps in mechanisms]

    def cumulant(s: float) -> float:
        return sum(
            n * _log_sum(np.log(p) + s * width * k) for (k, p), n in zip(cells, counts, strict=True)
        )

    # Chernoff: delta <= exp(K(s) - s eps), so eps <= (K(s) + log 1/delta) / s; the best s is where
    # the tail lies.
    best = minimize_scalar(
        lambda u: (cumulant(math.exp(u)) - math.log(delta)) / math.exp(u),
        bounds=(-6, 8),
        method="bounded",
    )
    s = math.exp(float(best.x))
    mean = variance = log_total = 0.0
    for (k, p), n in zip(cells, counts, strict=True):
        log_tilted = np.log(p) + s * width * k
        norm = _log_sum(log_tilted)
        tilted = np.exp(log_tilted - norm)
        one = float(tilted @ (width * k))
        mean, variance = mean + n * one, variance + n * float(tilted @ (width * k - one) ** 2)
        log_total += n * norm
    reach = 14 * math.sqrt(variance) + 40 / s + 10 * width
    points = 1 << max(10, math.ceil(math.log2(2 * reach / width)))
    spectrum = np.ones(points // 2 + 1, dtype=complex)
    offset = 0
    for (k, p), n in zip(cells, counts, strict=True):
        log_tilted = np.log(p) + s * width * k
        tilted = np.exp(log_tilted - _log_sum(log_tilted))
        center = round(float(tilted @ k))
        wrapped = np.zeros(points)
        np.add.at(wrapped, (k - center) % points, tilted)
        spectrum *= np.fft.rfft(wrapped) ** n
        offset += n * center
    composed = np.maximum(np.fft.irfft(spectrum, points), 0)
    position = np.arange(points)
    position[position >= points // 2] -= points
    loss = width * (position + offset)
    order = np.argsort(loss)
    loss, composed = loss[order], composed[order]
    # Where a cell holds much of the mass its midpoint is not its mean; over many steps that adds
    # up.
    shift = sum(
        n * (_moments(sigma, q)[0] - float(p @ (width * k)))
        for (k, p), (sigma, q, n) in zip(cells, mechanisms, strict=True)
    )

    def log_delta(eps: float) -> float:
        eps = eps - shift
        beyond = loss > eps
        gap = loss[beyond] - eps
        terms = composed[beyond] * np.exp(-s * gap) * -np.expm1(-gap)
        return math.log(max(float(terms.sum()), 1e-300)) + log_total - s * eps

    if log_delta(0.0) <= math.log(delta):
        return 0.0
    return float(
        brentq(
            lambda eps: log_delta(eps) - math.log(delta),
            0.0,
            float(best.fun) + abs(shift) + width,
            xtol=1e-9,
        )
    )


def gaussian(mu: float, delta: float) -> float:
    """Epsilon of a Gaussian mechanism by its closed form (Balle and Wang 2018, Theorem 8)."""

    def log_delta(eps: float) -> float:
        upper, lower = (
            float(log_ndtr(-eps / mu + mu / 2)),
            eps + float(log_ndtr(-eps / mu - mu / 2)),
        )
        return upper + math.log(max(-math.expm1(lower - upper), 1e-300))

    return float(brentq(lambda e: log_delta(e) - math.log(delta), 0, mu**2 + 60 * mu, xtol=1e-12))


def _cells(sigma: float, q: float, width: float) -> tuple[np.ndarray, np.ndarray]:
    """Grid positions k (losses k * width) and masses > 0 of one step's loss under the mixture."""

    def loss(x: float) -> float:
        return float(
            np.logaddexp(
                math.log1p(-q) if q < 1 else -math.inf, math.log(q) + (2 * x - 1) / (2 * sigma**2)
            )
        )

    low, high = loss(-_REACH * sigma), loss(1 + _REACH * sigma)
    edges = width * np.arange(math.floor(low / width), math.ceil(high / width) + 1)
    # x at which the loss passes each edge; below log(1 - q) none does.
    above = edges - (math.log1p(-q) if q < 1 else -math.inf)
    x = np.full(len(edges), -np.inf)
    passed = above > 0
    if q < 1:
        # log(exp(edge) - (1 - q)) = edge + log(1 - exp(-above))
        x[passed] = 0.5 + sigma**2 * (
            edges[passed] + np.log(-np.expm1(-above[passed])) - math.log(q)
        )
    else:
        x = 0.5 + sigma**2 * edges
    masses = (1 - q) * _between(x / sigma) + q * _between((x - 1) / sigma)
    k = np.arange(len(edges)) + round(edges[0] / width)
    points = np.zeros(len(edges))
    points[:-1] += masses / 2
    points[1:] += masses / 2
    kept = points > 0
    return k[kept], points[kept] / points.sum()


def _moments(sigma: float, q: float) -> tuple[float, float]:
    """Mean and standard deviation of one step's loss: the trapezoidal rule, exact for what is
    smooth and ends in zeros."""
    x = np.linspace(-_REACH * sigma, 1 + _REACH * sigma, 20_001)
    log_noise = -0.5 * (x / sigma) ** 2
    log_one = -0.5 * ((x - 1) / sigma) ** 2
    mixture = (1 - q) * np.exp(log_noise) + q * np.exp(log_one)
    losses = np.logaddexp(
        math.log1p(-q) if q < 1 else -np.inf, math.log(q) + (2 * x - 1) / (2 * sigma**2)
    )
    mean = float(mixture @ losses / mixture.sum())
    return mean, math.sqrt(float(mixture @ (losses - mean) ** 2 / mixture.sum()))


def _between(z: np.ndarray) -> np.ndarray:
    """Normal probability of [z_i, z_i+1], from whichever tail keeps its precision."""
    left, right = z[:-1], z[1:]
    return np.where(left > 0, ndtr(-left) - ndtr(-right), ndtr(right) - ndtr(left))


def _log_sum(values: np.ndarray) -> float:
    largest = float(values.max())
    return largest + math.log(float(np.exp(values - largest).sum()))
