"""The privacy-loss distribution of one Poisson-sampled Gaussian step, all grid points at once.

It is the distribution of dp-accounting's ``from_gaussian_mechanism``, with its own mechanism, tails
and connect-the-dots rule. Only the inverse of the privacy loss is evaluated here: the package does
so point by point in Python, which was most of the time of an answer.
"""

from __future__ import annotations

import math

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as google_pld
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss


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
        directions.append(
            pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, low, high, deltas)
        )
    return google_pld.PrivacyLossDistribution(*directions)


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
