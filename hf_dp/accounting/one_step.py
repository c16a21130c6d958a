"""The privacy-loss distribution of one Poisson-sampled Gaussian step, all grid points at once.

That of sampled rows of one user is in :mod:`hf_dp.accounting.user_rows`.

It is the distribution of dp-accounting's ``from_gaussian_mechanism``, with its own mechanism and
tails. The inverse of the privacy loss and the connect-the-dots rule are evaluated here: the package
does so point by point in Python, which was most of the time of an answer.
"""

from __future__ import annotations

import math

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as google_pld
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

_ROUNDING = 1e-12  # of a delta


def sampled_gaussian(
    noise_multiplier: float, sample_rate: float, interval: float
) -> google_pld.PrivacyLossDistribution:
    """Return the distribution under zero-out, in both directions, pessimistic.

    Args:
        noise_multiplier: > 0.
        sample_rate: in (0, 1).
        interval: between two points of the grid of losses, > 0.
    """
    directions = []
    for adjacency in (AdjacencyType.REMOVE, AdjacencyType.ADD):
        step = GaussianPrivacyLoss(
            noise_multiplier, sampling_prob=sample_rate, adjacency_type=adjacency
        )
        bounds = step.connect_dots_bounds()
        low = math.floor(bounds.epsilon_lower / interval)
        high = math.ceil(bounds.epsilon_upper / interval)
        deltas = _deltas(step, np.arange(low, high + 1) * interval)
        directions.append(losses_of(deltas, interval, low))
    return google_pld.PrivacyLossDistribution(*directions)


def losses_of(deltas: np.ndarray, interval: float, first: int) -> pld_pmf.DensePLDPmf:
    """Return the losses with these deltas on the grid, pessimistic between its points.

    Args:
        deltas: at the losses ``first * interval``, ``(first + 1) * interval``, and so on.
        interval: between two points of the grid of losses, > 0.

    Raises: ValueError when the deltas grow by more than rounding.
    """
    return pld_pmf.DensePLDPmf(
        interval,
        first,
        connect_the_dots(deltas, interval),
        infinity_mass=float(deltas.min()),
        pessimistic_estimate=True,
    )


def connect_the_dots(deltas: np.ndarray, interval: float) -> np.ndarray:
    """Return the probability of each grid point, such that delta is right there and too large
    between.

    Doroshenko et al. 2022 (arXiv 2207.04380), Algorithm 1 on a grid of equal gaps. What the points
    leave of 1 is the probability of the infinite loss, the last delta.

    Raises: ValueError when the deltas grow by more than rounding.
    """
    if len(deltas) == 1:
        return 1 - deltas
    if np.diff(deltas).max() > _ROUNDING:
        raise ValueError("The deltas of a privacy loss fall with epsilon, but these do not.")
    deltas = np.minimum.accumulate(deltas)
    falls, growth = np.diff(deltas), math.expm1(interval)
    probabilities = np.empty_like(deltas)
    probabilities[0] = 1 - deltas[0] + falls[0] / growth
    probabilities[1:-1] = (falls[1:] - falls[:-1] * math.exp(interval)) / growth
    probabilities[-1] = falls[-1] / math.expm1(-interval)
    return np.maximum(probabilities, 0.0)


def _deltas(step: GaussianPrivacyLoss, epsilons: np.ndarray) -> np.ndarray:
    """Return the delta of one direction at each epsilon.

    The loss is above epsilon exactly below some outcome x. An example takes part with probability
    q, so under removal the loss is ``log(1 - q + q exp(loss with q = 1))``, and under addition the
    negative of that.
    """
    rate, removal = step.sampling_prob, step.adjacency_type == AdjacencyType.REMOVE
    losses = epsilons if removal else -epsilons
    reached = losses > math.log1p(-rate)  # no outcome has a smaller one
    deltas = np.where(reached | (not removal), 0.0, -np.expm1(np.minimum(epsilons, 0.0)))
    # log(1 + (exp(loss) - 1) / q), rounded as the package rounds it.
    scaled = losses[reached] + math.log(1 / rate)
    with np.errstate(divide="ignore"):  # of what rounds to 0: infinitely far out
        inverse = scaled + np.log1p(-np.minimum(np.exp(math.log(1 / rate - 1) - scaled), 1.0))
    variance = step.standard_deviation**2
    x = -0.5 - inverse * variance if removal else 1 + (-0.5 + inverse * variance)
    deltas[reached] = step.mu_upper_cdf(x) - np.exp(epsilons[reached] + step.mu_lower_log_cdf(x))
    return np.clip(deltas, 0.0, 1.0)
