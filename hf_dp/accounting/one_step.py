"""The privacy-loss distribution of one Poisson-sampled step, all grid points at once.

Those of one example per draw are dp-accounting's ``from_gaussian_mechanism`` and
``from_truncated_subsampled_gaussian_mechanism``, with its own mechanism and tails. The inverse of
the privacy loss and the connect-the-dots rule are evaluated here: the package does so point by
point in Python, which was most of the time of an answer.

So it is with several sampled rows of one user. With the user a step's outcome has the density P =
sum over i of p_i N(i, sigma^2), p binomial; without, Q = N(0, sigma^2). The privacy loss log(P(y) /
Q(y)) rises with y, so the largest difference P(S) - exp(epsilon) Q(S) is taken above the one
outcome where the loss is epsilon. dp-accounting has this mechanism and finds that outcome point by
point; here it is found by Newton's method for all points at once (tests compare the two).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as google_pld
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from scipy.special import bdtrc, log_ndtr, logsumexp, ndtr, xlog1py
from scipy.stats import binom

from hf_dp.accounting.events import TruncatedPoissonSampledGaussian
from hf_dp.errors import AccountingRangeError

_ROUNDING = 1e-12  # of a delta

# A user has more rows in a step with less than this probability: then all of it counts as lost.
_TAIL = 1e-20
_LOG_CUT = -50.0  # of an outcome beyond the grid's ends, whose loss is rounded up
_AWAY = 10.0  # standard deviations: a normal number is farther out with less than exp(_LOG_CUT)
_CHUNK = 1 << 16  # grid points at a time
MAX_POINTS = 2 * 10**7
_NEWTON = 100  # at most
_CLOSE = 1e-10  # delta is largest at the outcome sought, so its error is the square of this


def losses_of(deltas: np.ndarray, interval: float, first: int) -> pld_pmf.DensePLDPmf:
    """Return the losses with these deltas on the grid, and deltas too large between its points.

    Doroshenko et al. 2022 (arXiv 2207.04380), Algorithm 1 on a grid of equal gaps. What the points
    leave of 1 is the probability of the infinite loss, the last delta.

    Args:
        deltas: at the losses ``first * interval``, ``(first + 1) * interval``, and so on.
        interval: between two points of the grid of losses, > 0.

    Raises: AccountingRangeError when the deltas grow by more than rounding.
    """
    if len(deltas) > 1 and np.diff(deltas).max() > _ROUNDING:
        raise AccountingRangeError(
            "The deltas of a privacy loss fall with epsilon, but rounding hides it here. Use more "
            "noise, or a lower sample rate."
        )
    deltas = np.minimum.accumulate(deltas)
    probabilities = 1 - deltas
    if len(deltas) > 1:
        falls, growth = np.diff(deltas), math.expm1(interval)
        probabilities[0] += falls[0] / growth
        probabilities[1:-1] = (falls[1:] - falls[:-1] * math.exp(interval)) / growth
        probabilities[-1] = falls[-1] / math.expm1(-interval)
    return pld_pmf.DensePLDPmf(
        interval,
        first,
        np.maximum(probabilities, 0.0),
        infinity_mass=float(deltas[-1]),
        pessimistic_estimate=True,
    )


def sampled_gaussian(
    noise_multiplier: float, sample_rate: float, interval: float, relation: str = "zero_out"
) -> google_pld.PrivacyLossDistribution:
    """Return the distribution in both directions, or in one where they are equal, pessimistic.

    Args: sample_rate: in (0, 1]. interval: between two points of the grid of losses.
    """
    adjacencies = [AdjacencyType.REMOVE, AdjacencyType.ADD][: 1 if sample_rate == 1 else 2]
    directions = []
    for adjacency in [AdjacencyType.REPLACE] if relation == "replace_one" else adjacencies:
        step = GaussianPrivacyLoss(
            noise_multiplier, sampling_prob=sample_rate, adjacency_type=adjacency
        )
        bounds = step.connect_dots_bounds()
        low = math.floor(bounds.epsilon_lower / interval)
        high = math.ceil(bounds.epsilon_upper / interval)
        deltas = _deltas(step, np.arange(low, high + 1) * interval)
        directions.append(losses_of(deltas, interval, low))
    return google_pld.PrivacyLossDistribution(*directions)


def truncated_gaussian(
    event: TruncatedPoissonSampledGaussian, interval: float, relation: str
) -> google_pld.PrivacyLossDistribution:
    """Return the distribution of one step whose sample is cut to ``max_batch_size``, pessimistic.

    Where the others alone fill the batch, an example that is drawn takes another's place, so the
    sum moves as if it replaced one.
    """
    sigma, most, others = event.noise_multiplier, event.max_batch_size, event.num_examples - 1
    whole = sampled_gaussian(sigma, event.sample_rate, interval, relation)
    filled = float(binom.sf(most - 1, others, event.sample_rate))
    if filled == 0:
        return whole
    cut = float(binom.sf(most, event.num_examples, event.sample_rate))
    taken = cut * most / filled / event.num_examples  # the example's own chance then
    return sampled_gaussian(sigma / 2, taken, interval, "replace_one").compute_mixture(
        whole, filled
    )


def _deltas(step: GaussianPrivacyLoss, epsilons: np.ndarray) -> np.ndarray:
    """Return the delta of one direction at each epsilon.

    The loss is above epsilon exactly below some outcome x.
    """
    if step.adjacency_type == AdjacencyType.REPLACE:
        reached, x = np.full(len(epsilons), True), _replaced(step, epsilons)
    else:
        reached, x = _outcomes(step, epsilons)
    removal = step.adjacency_type == AdjacencyType.REMOVE
    deltas = np.where(reached | (not removal), 0.0, -np.expm1(np.minimum(epsilons, 0.0)))
    deltas[reached] = step.mu_upper_cdf(x) - np.exp(epsilons[reached] + step.mu_lower_log_cdf(x))
    return np.clip(deltas, 0.0, 1.0)


def _outcomes(step: GaussianPrivacyLoss, epsilons: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which epsilons some outcome's loss is below under removal or addition, and where.

    An example takes part with probability q, so under removal the loss is ``log(1 - q + q exp(loss
    with q = 1))``, and under addition the negative of that.
    """
    rate, removal = step.sampling_prob, step.adjacency_type == AdjacencyType.REMOVE
    losses = epsilons if removal else -epsilons
    with np.errstate(divide="ignore"):  # of what rounds to 0: infinitely far out
        reached = losses > np.log1p(-rate)  # no outcome has a smaller one
        # log(1 + (exp(loss) - 1) / q), rounded as the package rounds it.
        scaled = losses[reached] + math.log(1 / rate)
        inverse = scaled + np.log1p(-np.minimum(np.exp(np.log(1 / rate - 1) - scaled), 1.0))
    variance = step.standard_deviation**2
    return reached, -0.5 - inverse * variance if removal else 1 + (-0.5 + inverse * variance)


def _replaced(step: GaussianPrivacyLoss, losses: np.ndarray) -> np.ndarray:
    """Return the outcomes that have these losses where one example replaces another.

    The densities are symmetric about 0, so the loss is odd. It is ``log((1 - q + q exp(-1 / (2
    sigma^2) - x / sigma^2)) / (1 - q + q exp(-1 / (2 sigma^2) + x / sigma^2)))``.
    """
    variance, rate = step.standard_deviation**2, step.sampling_prob
    half = np.abs(losses) / 2
    with np.errstate(divide="ignore"):  # of a loss of 0, and of a rate of 1
        sinh = half + np.log(-np.expm1(-2 * half)) - math.log(2)
        scaled = 0.5 / variance + np.log1p(-rate) - math.log(rate) + sinh
    # exp(300) is so large that arcsinh is a logarithm there, up to rounding
    arcsinh = np.arcsinh(np.exp(np.minimum(scaled, 300.0))) + np.maximum(scaled - 300.0, 0.0)
    return -variance * np.sign(losses) * (arcsinh + half)


def sampled_rows(
    noise_multiplier: float, sample_rate: float, max_rows: int, interval: float
) -> google_pld.PrivacyLossDistribution:
    """Return the distribution under zero-out, in both directions, pessimistic.

    Args: noise_multiplier, sample_rate: of a row. max_rows: of a user. interval: between losses.

    Raises: AccountingRangeError when the losses of one step need more than MAX_POINTS points.
    """
    step = _Rows(noise_multiplier, sample_rate, max_rows)
    directions = []
    for deltas, (smallest, largest) in (
        (step.removal, step.losses_with()),
        (step.addition, step.losses_without()),
    ):
        low, high = math.floor(smallest / interval), math.ceil(largest / interval)
        if high - low > MAX_POINTS:
            raise AccountingRangeError(
                f"The privacy losses of one step reach {largest:.3g}, too far for the grid: one "
                f"user can have up to {max_rows} rows in a step, each of noise multiplier "
                f"{noise_multiplier:.3g}. Raise the noise, or lower max_rows_per_unit."
            )
        chunks = range(low, high + 1, _CHUNK)
        points = [np.arange(start, min(start + _CHUNK, high + 1)) for start in chunks]
        found = np.concatenate([deltas(each * interval) for each in points])
        directions.append(losses_of(found, interval, low))
    return google_pld.PrivacyLossDistribution(*directions)


class _Rows:
    """P and Q of the module's docstring, with sigma as the unit of outcomes y.

    A user's rows beyond the last that is likely enough are left out of P. That lowers P everywhere,
    so ``removal`` adds what was left out, and ``addition`` is only made larger.
    """

    def __init__(self, noise_multiplier: float, sample_rate: float, max_rows: int):
        counts = np.arange(max_rows + 1)
        beyond = bdtrc(counts, max_rows, sample_rate)  # more rows than each count
        last = max(1, int(np.argmax(beyond < _TAIL)))
        self.left_out = float(beyond[last])
        self.counts = counts[: last + 1]
        self.shifts = self.counts / noise_multiplier
        self.log_p = binom.logpmf(self.counts, max_rows, sample_rate)
        self.log_none = float(xlog1py(max_rows, -sample_rate))
        # log of p_i exp(-i^2 / (2 sigma^2)): what y does not move
        self._fixed = self.log_p - self.shifts**2 / 2

    def loss(self, y: float) -> float:
        """Return the loss of one outcome."""
        return float(logsumexp(self._fixed + self.shifts * y))

    def losses_with(self) -> tuple[float, float]:
        """Return the losses between which all outcomes of P are but for exp(_LOG_CUT)."""

        def log_beyond(y: float) -> float:
            return float(logsumexp(self.log_p + log_ndtr(self.shifts - y)))

        return self.loss(-_AWAY), self.loss(_first(log_beyond, 0.0, float(self.shifts[-1]) + _AWAY))

    def losses_without(self) -> tuple[float, float]:
        """Return the negative losses between which all outcomes of Q are but for exp(_LOG_CUT)."""
        return -self.loss(_AWAY), -self.loss(-_AWAY)

    def outcomes(self, losses: np.ndarray) -> np.ndarray:
        """Return the outcomes that have these losses, each above the loss of no row, log p_0.

        With at least one row, log(P / Q - p_0) is convex in y with slopes of 1 / sigma or more. So
        Newton's method, begun above the root, comes down to it and never passes it.
        """
        some, fixed = self.shifts[1:], self._fixed[1:]
        # log(exp(loss) - p_0), without a difference of numbers that are nearly equal
        wanted = losses + np.log(-np.expm1(self.log_none - losses))
        y = (wanted - fixed[0]) / some[0]  # where one row alone has the loss; the root is below
        for _ in range(_NEWTON):
            terms = fixed + np.multiply.outer(y, some)
            top = terms.max(axis=1)
            weights = np.exp(terms - top[:, None])
            total = weights.sum(axis=1)
            with np.errstate(invalid="ignore"):
                moved = (top + np.log(total) - wanted) * total / (weights @ some)
            y = np.where(np.isfinite(moved), y - moved, y)
            if not np.any(np.abs(np.nan_to_num(moved)) > _CLOSE * (1 + np.abs(y))):
                return y
        raise ValueError("Newton's method did not find the outcomes of these privacy losses.")

    def removal(self, epsilons: np.ndarray) -> np.ndarray:
        """Return P(loss > epsilon) - exp(epsilon) Q(loss > epsilon), and what was left out of P."""
        reached = epsilons > self.log_none
        deltas = -np.expm1(np.minimum(epsilons, 0.0))
        y = self.outcomes(epsilons[reached])
        above = ndtr(np.subtract.outer(self.shifts, y))
        deltas[reached] = np.exp(self.log_p) @ above - np.exp(epsilons[reached] + log_ndtr(-y))
        return np.clip(deltas + self.left_out, 0.0, 1.0)

    def addition(self, epsilons: np.ndarray) -> np.ndarray:
        """Return Q(loss < -epsilon) - exp(epsilon) P(loss < -epsilon)."""
        reached = -epsilons > self.log_none
        deltas = np.zeros_like(epsilons)
        y = self.outcomes(-epsilons[reached])
        below = log_ndtr(-np.subtract.outer(self.shifts, y))
        terms = self.log_p[:, None] + below + epsilons[reached]
        deltas[reached] = ndtr(y) - np.exp(logsumexp(terms, axis=0))
        return np.clip(deltas, 0.0, 1.0)


def _first(log_beyond: Callable[[float], float], low: float, high: float) -> float:
    """Return an outcome with ``log_beyond`` at most _LOG_CUT, near the first one."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if log_beyond(middle) > _LOG_CUT else (low, middle)
    return high
