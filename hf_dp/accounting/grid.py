"""A privacy-loss distribution composed with itself, and its epsilon at a delta.

Both are dp-accounting's, whose objects they take and give. Only what it does point by point in
Python, or once for each of forty orders, is done here for all points at once: that was most of the
time of an answer. Private parts of the package are used in this module alone
(``tests/accounting/test_against_the_package.py`` fails by name when they change).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as google_pld
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from dp_accounting.rdp import rdp_privacy_accountant as google_rdp
from scipy import fft

# What may be cut off the ends of a composed distribution; it is added to the infinite loss.
_TAIL = 1e-15

_ORDERS = 20  # of the Chernoff bounds on each end


class Grid(NamedTuple):
    """Losses ``lowest * interval``, ``(lowest + 1) * interval``, ..., their probabilities, and that
    of an infinite loss."""

    lowest: int
    interval: float
    probabilities: np.ndarray
    infinite: float

    @property
    def losses(self) -> np.ndarray:
        """The losses, one for each probability."""
        return (np.arange(len(self.probabilities)) + self.lowest) * self.interval


def on_grid(pmf: pld_pmf.PLDPmf) -> Grid:
    """Return the losses of one direction."""
    dense = pmf.to_dense_pmf()
    return Grid(
        dense._lower_loss,
        dense._discretization,
        np.asarray(dense._probs),
        float(dense._infinity_mass),
    )


def directions(loss: google_pld.PrivacyLossDistribution) -> list[pld_pmf.PLDPmf]:
    """Return the losses under removal, and under addition where they differ."""
    return [loss._pmf_remove] if loss._symmetric else [loss._pmf_remove, loss._pmf_add]


def self_composed(
    loss: google_pld.PrivacyLossDistribution, times: int
) -> google_pld.PrivacyLossDistribution:
    """Return the distribution of ``times`` independent steps, >= 1."""
    return google_pld.PrivacyLossDistribution(*(_composed(pmf, times) for pmf in directions(loss)))


def _composed(pmf: pld_pmf.PLDPmf, times: int) -> pld_pmf.PLDPmf:
    if not isinstance(pmf, pld_pmf.DensePLDPmf):  # few points
        return pmf.self_compose(times, _TAIL)
    lowest, interval, probabilities, infinite = on_grid(pmf)
    low, high = _ends(probabilities, times)
    others = np.zeros(fft.next_fast_len(max(high - low + 1, len(probabilities)), real=True))
    others[: len(probabilities)] = probabilities
    most = int(others.argmax())
    others[most] = 0.0
    z = fft.rfft(np.roll(others, -most)) + (probabilities[most] - 1)
    composed = fft.irfft(np.exp(log_power(z, times)), len(others))
    finite = times * math.log1p(-infinite)
    return pld_pmf.DensePLDPmf(
        interval,
        lowest * times + low,
        np.roll(composed, most * times - low)[: high - low + 1],
        _TAIL - math.expm1(finite),
        pmf._pessimistic_estimate,
    )


def log_power(z: np.ndarray, times: int) -> np.ndarray:
    """Return ``times log(1 + z)`` of complex numbers, where ``1 + z`` are the Fourier coefficients
    of a step whose most likely loss is moved to 0.

    Without that loss the transform only rounds what is as small as the probability of the others.
    A power of ``1 + z`` itself would be wrong by ``times`` 1e-16 of its size.
    """
    near = np.abs(z) < 0.5
    square = np.where(near, 2 * z.real + z.real**2 + z.imag**2, 0.0)  # of the size, less 1
    with np.errstate(divide="ignore"):
        logs = np.where(near, np.log1p(square) / 2, np.log(np.abs(1 + z)))
    return times * logs + 1j * (times * np.arctan2(z.imag, 1 + z.real))


def _ends(probabilities: np.ndarray, times: int) -> tuple[int, int]:
    """Return the first and the last point, by Chernoff bounds, of what is not cut off.

    The bounds' orders are +-1 / n to +-20 / n for n points, so the exponentials are powers of one
    and none is large.
    """
    size = len(probabilities)
    low, high = 0, (size - 1) * times
    away = math.log(2 / _TAIL)
    growth = np.exp(np.arange(size) / size)
    for sign, factor in ((1, growth), (-1, 1 / growth)):
        weighted = probabilities
        for number in range(1, _ORDERS + 1):
            weighted = weighted * factor
            bound = (times * math.log(float(weighted.sum())) + away) * size / number
            if sign > 0:
                high = min(high, math.ceil(bound))
            else:
                low = max(low, math.floor(-bound))
    return low, high


def composed_by(accountant: PLDAccountant) -> google_pld.PrivacyLossDistribution:
    """Return the distribution of all that an accountant of dp-accounting composed."""
    return accountant._pld


def epsilon_at(loss: google_pld.PrivacyLossDistribution, delta: float) -> float:
    """Return the smallest epsilon >= 0 at which both directions have at most ``delta``.

    It is infinity where an infinite loss alone is more likely than that.
    """
    return max(_epsilon_of(pmf, delta) for pmf in directions(loss))


def _epsilon_of(pmf: pld_pmf.PLDPmf, delta: float) -> float:
    """Solve ``delta = P(infinite) + sum over losses above epsilon of P (1 - exp(epsilon - loss))``.

    With the sums U of P and V of P exp(-loss) over the losses above epsilon, this is
    ``exp(epsilon) = (U - delta) / V``. From the largest loss down, the sums end at the first loss
    that this epsilon is not below. Losses below 0 only matter to epsilons below 0.
    """
    lowest, interval, all_probabilities, infinite = on_grid(pmf)
    if infinite > delta:
        return math.inf
    points = np.arange(len(all_probabilities) - 1, max(-1, -lowest), -1)
    losses = (points + lowest) * interval
    probabilities = all_probabilities[points]
    upper = np.cumsum(np.concatenate([[infinite], probabilities]))
    lower = np.cumsum(np.concatenate([[0.0], np.exp(-losses) * probabilities]))
    if upper[-1] <= delta:
        return 0.0
    # Where all exp(-loss) round to 0, epsilon is the loss itself.
    beyond = (upper[1:] >= delta) & (lower[1:] == 0)
    if beyond.any():
        return float(losses[beyond.argmax()])
    # (In the far tail the FFT leaves probabilities, and so V, a little below 0.)
    solved = (upper > delta) & (lower > 0)
    epsilons = np.full(len(upper), -math.inf)
    epsilons[solved] = np.log((upper[solved] - delta) / lower[solved])
    ends = epsilons[:-1] >= losses
    if ends.any():
        return float(epsilons[ends.argmax()])
    return max(0.0, float(epsilons[-1])) if solved[-1] else math.inf


def best_of_runs(
    orders: tuple[float, ...], curve: np.ndarray, mean_runs: float, shape: float
) -> np.ndarray:
    """Return the Renyi curve of the best of a random number of runs, at the orders of one run's."""
    return google_rdp._compute_rdp_repeat_and_select(orders, curve, mean_runs, shape)
