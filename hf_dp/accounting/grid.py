"""A privacy-loss distribution composed with itself, and its epsilon at a delta.

Both are dp-accounting's, whose objects they take and give. Only what it does point by point in
Python, or once for each of forty orders, is done here for all points at once: that was most of the
time of an answer.
"""

from __future__ import annotations

import math

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as google_pld
from scipy import fft

# What may be cut off the ends of a composed distribution; it is added to the infinite loss.
_TAIL = 1e-15

_ORDERS = 20  # of the Chernoff bounds on each end


def self_composed(
    loss: google_pld.PrivacyLossDistribution, times: int
) -> google_pld.PrivacyLossDistribution:
    """Return the distribution of ``times`` independent steps, >= 1."""
    directions = [_composed(loss._pmf_remove, times)]
    if not loss._symmetric:
        directions.append(_composed(loss._pmf_add, times))
    return google_pld.PrivacyLossDistribution(*directions)


def _composed(pmf: pld_pmf.PLDPmf, times: int) -> pld_pmf.PLDPmf:
    if not isinstance(pmf, pld_pmf.DensePLDPmf):  # few points
        return pmf.self_compose(times, _TAIL)
    probabilities = np.asarray(pmf._probs)
    low, high = _ends(probabilities, times)
    length = fft.next_fast_len(max(high - low + 1, len(probabilities)))
    composed = np.real(fft.ifft(fft.fft(probabilities, length) ** times))
    finite = times * math.log1p(-pmf._infinity_mass)
    return pld_pmf.DensePLDPmf(
        pmf._discretization,
        pmf._lower_loss * times + low,
        np.roll(composed, -low)[: high - low + 1],
        _TAIL - math.expm1(finite),
        pmf._pessimistic_estimate,
    )


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


def epsilon_at(loss: google_pld.PrivacyLossDistribution, delta: float) -> float:
    """Return the smallest epsilon >= 0 at which both directions have at most ``delta``.

    It is infinity where an infinite loss alone is more likely than that.
    """
    one = _epsilon_of(loss._pmf_remove, delta)
    return one if loss._symmetric else max(one, _epsilon_of(loss._pmf_add, delta))


def _epsilon_of(pmf: pld_pmf.PLDPmf, delta: float) -> float:
    """Solve ``delta = P(infinite) + sum over losses above epsilon of P (1 - exp(epsilon - loss))``.

    With the sums U of P and V of P exp(-loss) over the losses above epsilon, this is
    ``exp(epsilon) = (U - delta) / V``. From the largest loss down, the sums end at the first loss
    that this epsilon is not below. Losses below 0 only matter to epsilons below 0.
    """
    dense = pmf.to_dense_pmf()
    infinite = float(dense._infinity_mass)
    if infinite > delta:
        return math.inf
    points = np.arange(dense.size - 1, max(-1, -dense._lower_loss), -1)
    losses = (points + dense._lower_loss) * dense._discretization
    probabilities = np.asarray(dense._probs)[points]
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
