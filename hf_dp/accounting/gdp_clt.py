"""Gaussian DP by the central limit theorem: an estimate and never a guarantee.

It serves comparison with papers that report it.

Bu, Dong, Long, Su 2019 (arXiv 1911.11607): T Poisson-sampled steps at rate q and noise multiplier
sigma approach mu-GDP with mu = q sqrt(T (exp(1/sigma^2) - 1)) as T grows with q sqrt(T) fixed;
mechanisms compose by the square root of the sum of squares. Away from that limit the value can be
far too small: (sigma 0.4, q 1e-4, T 1000, delta 1e-6) gives 0.279 where the true epsilon is 4.022.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from hf_dp._validate import in_unit_interval, integer, positive
from hf_dp.accounting.composition import Composition, Epsilon, Kind, Range
from hf_dp.accounting.events import PoissonSampledGaussian, PublishedForwardNoise

# exp(1/sigma^2) and the tails are representable in this range; the limit theorem need not be
# accurate in it.
RANGE = Range(
    "gdp_clt",
    min_noise_multiplier=0.1,
    max_noise_multiplier=1000.0,
    min_sample_rate=1e-8,
    max_steps=10**9,
    min_delta=1e-100,
    next_move='Use accountant="rdp", which is a bound.',
)


def mu(composition: Composition) -> float:
    """Return the GDP parameter of the limit.

    Unsampled Gaussians enter exactly, with sqrt(T) / sigma. DP-FP as published enters as in the
    paper's equation 11, ``p sqrt(T M (exp(C^2/sigma^2) - 1))``: its figure, by its assumptions.
    """
    squares = [composition.gaussian_mu**2]
    events: tuple[PoissonSampledGaussian | PublishedForwardNoise, ...] = (
        *composition.sampled,
        *composition.of(PublishedForwardNoise),
    )
    for event in events:
        growth = math.expm1(1 / event.noise_multiplier**2)
        squares.append(event.sample_rate**2 * event.steps * growth)
    return math.sqrt(math.fsum(squares))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the epsilon >= 0 at which mu-GDP is (epsilon, delta)-DP, to a relative 1e-10.

    Solves delta = Phi(-eps/mu + mu/2) - exp(eps) Phi(-eps/mu - mu/2) (Dong, Roth, Su 2019,
    Corollary 2.13; Balle, Wang 2018, Theorem 8), in logarithms so that exp(eps) does not overflow.
    """

    from scipy.special import log_ndtr  # half of the time of a command's help

    def excess(eps: float) -> float:
        upper = float(log_ndtr(-eps / mu + mu / 2))
        lower = eps + float(log_ndtr(-eps / mu - mu / 2))
        # log(exp(upper) - exp(lower)); the two are equal only where the difference underflows.
        log_delta = upper + math.log(-math.expm1(lower - upper)) if lower < upper else -math.inf
        return max(log_delta, -1e4) - math.log(delta)

    if excess(0.0) <= 0:
        return 0.0
    # Gaussian tail: the loss has mean mu^2/2 and standard deviation mu, so delta is reached before.
    high = mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1e-9
    return _root(excess, 0.0, high)


def gaussian_mu(target: float, delta: float) -> float:
    """Return the mu whose epsilon at ``delta`` is ``target``, > 0."""
    high = 1.0
    while gaussian_epsilon(high, delta) < target:
        high *= 2
    return _root(lambda mu: gaussian_epsilon(mu, delta) - target, 1e-12, high)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the lower end of a bracket of relative width 1e-12 around a sign change of a monotone
    function, so that noise that was calibrated to a target does not read back above it. (Importing
    scipy.optimize for one root takes half of the time of `hf-dp account`.)
    """
    above = function(low) > 0
    if (function(high) > 0) == above:
        raise ArithmeticError(f"No change of sign between {low!r} and {high!r}.")
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if (function(middle) > 0) == above:
            low = middle
        else:
            high = middle
    return low


def noise_multiplier(target_epsilon: float, delta: float, sample_rate: float, steps: int) -> float:
    """Return the noise that the limit theorem asks for.

    Its only purpose is to reproduce papers that calibrate by it. Solves ``mu = q sqrt(T
    (exp(1/sigma^2) - 1))`` for the mu whose epsilon at ``delta`` is the target (Du and Mi 2021,
    equations 3 and 11, where T counts micro-batches). The true cost of such a run can be several
    times the target: in their setting for 1.73 it is 5.90 by PLD.

    Raises: InvalidArgumentError.
    """
    target, delta = positive("target_epsilon", target_epsilon), in_unit_interval("delta", delta)
    rate, steps = in_unit_interval("sample_rate", sample_rate, one=True), integer("steps", steps, 1)
    return 1 / math.sqrt(math.log1p(gaussian_mu(target, delta) ** 2 / (rate**2 * steps)))


def epsilon(composition: Composition, delta: float, relation: str = "zero_out") -> Epsilon:
    """Return an estimate of epsilon at ``delta``. Raises: AccountingRangeError outside RANGE."""
    RANGE.check(composition, delta)
    published = bool(composition.of(PublishedForwardNoise))
    kind: Kind = "not established" if published else "estimate"
    return Epsilon(gaussian_epsilon(mu(composition), delta), kind)
