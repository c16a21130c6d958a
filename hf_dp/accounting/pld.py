"""Privacy-loss distributions with Google's ``dp-accounting``: the default accountant.

It is tight and has no error setting to misuse. A step's privacy loss is put on a grid by the
pessimistic connect-the-dots rule (Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022, arXiv
2207.04380) and composed by FFT; both directions of zero-out are computed, and the worse one counts.
The result is min(PLD + SLACK, RDP). Both are upper bounds; RDP is tighter in a few corners (few
steps of very weak mechanisms, where the grid is coarser than the loss). RDP does not know
replace-one, groups, truncated samples, rows of users, allocations and events from outside, so there
the result is PLD + SLACK. Rates below SMALL_RATE have a grid of their own and no slack
(:mod:`hf_dp.accounting.tilted`).
"""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from dp_accounting.pld import privacy_loss_distribution as google_pld
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from dp_accounting.privacy_accountant import NeighboringRelation
from scipy.optimize import brentq
from scipy.special import log_ndtr, logsumexp
from scipy.stats import binom

from hf_dp.accounting import rdp, tilted
from hf_dp.accounting.allocation import allocated
from hf_dp.accounting.composition import Composition, Epsilon, Range
from hf_dp.accounting.event import Event
from hf_dp.accounting.events import (
    GroupedGaussian,
    PoissonSampledGaussian,
    RandomAllocationGaussian,
    SampledRecordRelease,
    TruncatedPoissonSampledGaussian,
    UserRowsGaussian,
)
from hf_dp.accounting.grid import composed_by, directions, epsilon_at, on_grid, self_composed
from hf_dp.accounting.knows import POISSON, VISIBLE
from hf_dp.accounting.one_step import sampled_gaussian, sampled_rows, truncated_gaussian
from hf_dp.errors import UnsupportedEventError

# Each limit is the edge of what was compared with independent computations (an FFT with exponential
# tilting up to 1e5 steps, prv-accountant up to 1e6): noise multipliers from 0.3, rates from 1.48e-5
# on the fixed grid and from 1e-8 on one that follows epsilon. Large noise multipliers only loosen
# the result, and RDP then caps it.
RANGE = Range(
    "pld",
    min_noise_multiplier=0.3,
    max_noise_multiplier=100.0,
    min_sample_rate=1e-8,
    max_steps=10**6,
    min_delta=1e-11,
    next_move='Use accountant="rdp".',
)

# Below this rate a fixed grid is too coarse, and SLACK may be larger than epsilon.
SMALL_RATE = 1e-5

# FFT rounding may make epsilon of the plain composition too small. The error grows with 1 / delta
# and with steps. At noise 0.3 and rate 1e-5, after 1e6 steps, the plain result and that of tilted
# distributions differ by 1.3e-3 at delta 1e-8, by 1.4e-4 at 1e-7, and by less than 1e-6 at 1e-6. So
# below this delta tilted distributions are composed, three times as slow.
TILTED_BELOW = 1e-6

# Truncated samples, visible samples, groups and replace-one have heavier tails, where FFT rounding
# takes more, and a tilted composition takes up to a minute. RDP cannot replace it for truncated
# samples, groups and replace-one, and the tilted composition cannot begin with it.
HEAVY_TAILS = dataclasses.replace(
    RANGE,
    min_sample_rate=SMALL_RATE,
    max_steps=10**5,
    min_delta=1e-7,
    next_move='For visible samples, use accountant="rdp". No other accountant describes truncated '
    "samples, rows of users, groups, replace-one, or events from outside hf_dp.",
)

# Less noise spreads the grid of an allocation over too much.
ALLOCATED = dataclasses.replace(
    HEAVY_TAILS,
    min_noise_multiplier=0.45,
    min_sample_rate=1e-4,
    next_move='No other accountant describes random allocation. Use sampling="poisson".',
)

# The closed form has no grid; these limits only keep its evaluation away from overflow.
CLOSED_FORM = dataclasses.replace(
    RANGE,
    min_noise_multiplier=0.05,
    max_noise_multiplier=1e4,
    min_sample_rate=1e-9,
    max_steps=10**9,
    min_delta=1e-20,
    next_move="No accountant of hf_dp covers this range.",
)

# The grid grows with epsilon: at 433 it needs 1.5 s, at 5e5 more memory than a machine has. Such
# values have no use.
MAX_EPSILON = 500.0

# More than the largest error of FFT rounding that was measured at deltas from 1e-7: 2.2e-4, for one
# visible sample at noise 0.3 and rate 1e-5 beside 1e5 Poisson-sampled steps of replace-one (against
# a composition in 80 bits), and for 1e5 visible samples at rate 1e-4, where epsilon is 195 (against
# a tilted FFT, whose epsilon is up to 1.6e-4 too large there). At epsilons below 30 it was at most
# 2.9e-5 otherwise (truncated and allocated samples, rows of users, replace-one).
SLACK = 1e-3

COARSE, FINE = 1e-4, 1e-5

# From this epsilon on the fine grid was never worth its cost, up to 10 times the time and memory.
FINE_BELOW = 3.0

# The fine grid is skipped when it would gain less than about this, half of SLACK.
WORTHWHILE_GAIN = SLACK / 2

_RELATIONS = {
    "zero_out": NeighboringRelation.REPLACE_SPECIAL,
    "add_remove": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace_one": NeighboringRelation.REPLACE_ONE,
}
Distribution: TypeAlias = google_pld.PrivacyLossDistribution
Secret: TypeAlias = (
    PoissonSampledGaussian
    | GroupedGaussian
    | RandomAllocationGaussian
    | TruncatedPoissonSampledGaussian
    | UserRowsGaussian
)


def epsilon(composition: Composition, delta: float, relation: str = "zero_out") -> Epsilon:
    """Return an upper bound on epsilon at ``delta``.

    It takes 0.05 to 0.5 s for a new mechanism and half of that for more steps of a known one; ten
    times as long where the fine grid is worth it (epsilon < 3 and tens of thousands of steps). At
    rates below SMALL_RATE it takes 0.05 to 5 s.

    Raises: AccountingRangeError outside RANGE or above MAX_EPSILON.
    """
    if _has_closed_form(composition):
        CLOSED_FORM.check(composition, delta)
        scale = 2.0 if relation == "replace_one" else 1.0
        return Epsilon(_closed_form(composition, delta, scale), "bound")
    small_rate = min(composition.sample_rates, default=1.0) < SMALL_RATE
    # RDP bounds the plain mechanisms under zero-out; elsewhere it only estimates how large the grid
    # would become.
    secret, allocations = _secret(composition), composition.of(RandomAllocationGaussian)
    poisson = [event for event in secret if isinstance(event, PoissonSampledGaussian)]
    bounded = relation != "replace_one" and len(poisson) == len(secret) and not composition.outside
    heavy = not bounded or composition.of(SampledRecordRelease)
    limits = ALLOCATED if allocations else HEAVY_TAILS if heavy else RANGE
    limits.check(composition, delta)
    about, order = rdp.epsilon_and_order(composition if bounded else _at_worst(composition), delta)
    if about > MAX_EPSILON and not allocations and not composition.of(UserRowsGaussian):
        raise RANGE.error(f"epsilon up to {MAX_EPSILON}, got about {about:.6g}")
    if bounded and about == 0:
        return Epsilon(0.0, "bound")
    if small_rate:
        return Epsilon(tilted.of_small_rates(poisson, delta, about), "bound")
    start = None if heavy or delta >= TILTED_BELOW else about
    value = _grid_epsilon(composition, delta, COARSE, relation, start)
    if value < FINE_BELOW and _fine_grid_gain(composition, order) > WORTHWHILE_GAIN:
        value = min(value, _grid_epsilon(composition, delta, FINE, relation, start))
    if allocations and math.isinf(value):
        raise ALLOCATED.error("more noise, or more steps per allocation, than were given")
    return Epsilon(min(value + SLACK, about if bounded else math.inf), "bound")


def _secret(composition: Composition) -> tuple[Secret, ...]:
    """Return the mechanisms whose sample, if they have one, is secret; all plain Gaussians as one
    step."""
    mu = composition.gaussian_mu
    return (
        *composition.sampled,
        *composition.of(RandomAllocationGaussian),
        *composition.of(TruncatedPoissonSampledGaussian),
        *composition.of(UserRowsGaussian),
        *composition.of(GroupedGaussian),
        *([PoissonSampledGaussian(1 / mu, 1.0, 1)] if mu > 0 else []),
    )


def _at_worst(composition: Composition) -> Composition:
    """Return the steps as if one example moved each sum by 2 C, no sample were truncated, no user
    had several rows, and allocations were Poisson samples."""
    plain = (
        PoissonSampledGaussian(event.noise_multiplier / 2, event.sample_rate, event.steps)
        for event in _secret(composition)
    )
    seen = (
        dataclasses.replace(event, noise_multiplier=event.noise_multiplier / 2)
        for event in composition.of(SampledRecordRelease)
    )
    return dataclasses.replace(composition, events=(*plain, *seen))


def _fine_grid_gain(composition: Composition, order: float) -> float:
    """Return roughly how much epsilon falls from the coarse to the fine grid.

    The coarse grid adds up to COARSE^2 / 4 to the variance of each sampled step's loss. By the
    Chernoff bound at tilt order - 1, that of the best Renyi order, an extra variance V costs
    (order - 1) V / 2 of epsilon. Measured gains were 0.4 to 2 times this. The estimate only decides
    whether to spend the time: both grids give upper bounds.
    """
    steps = sum(_times(event) for event in _secret(composition))
    return (order - 1) * steps * COARSE**2 / 8


def _grid_epsilon(
    composition: Composition, delta: float, interval: float, relation: str, start: float | None
) -> float:
    """Return epsilon on one grid. With ``start``, for Poisson-sampled and plain Gaussians alone, it
    composes tilted distributions, and returns infinity if epsilon is not below ``start``."""
    secret = _secret(composition)
    if start is not None:
        once = [(_one_step(each.with_steps(1), interval, relation), each.steps) for each in secret]
        return tilted.of_distributions(once, delta, start)
    parts = [_self_composed(event, interval, relation) for event in secret]
    scale = 2 if relation == "replace_one" else 1  # vectors are another's, not nothing
    parts += [
        _visible(
            dataclasses.replace(event, noise_multiplier=event.noise_multiplier / scale), interval
        )
        for event in composition.of(SampledRecordRelease)
    ]
    parts += [
        self_composed(_outside(event.with_steps(1), interval, relation), _times(event))
        for event in composition.outside
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total.compose(part)
    return epsilon_at(total, delta)


def _times(event: Event) -> int:
    """Return how often what ``with_steps(1)`` is ran: steps, or whole allocations."""
    return event.steps // event.with_steps(1).steps


# Cached: building a step is most of the work, and a run asks again with more steps.
@lru_cache(maxsize=32)
def _one_step(event: Secret, interval: float, relation: str) -> Distribution:
    """Return the distribution of one step, or of one whole allocation.

    Args: event: with steps 1, so that it is found again.
    """
    sigma, rate = event.noise_multiplier, event.sample_rate
    if isinstance(event, RandomAllocationGaussian):
        return allocated(sigma, event.steps_per_allocation, interval)
    if isinstance(event, UserRowsGaussian):
        return sampled_rows(sigma, rate, event.max_rows, interval)
    if isinstance(event, TruncatedPoissonSampledGaussian):
        return truncated_gaussian(event, interval, relation)
    if isinstance(event, GroupedGaussian):
        relation = "replace_one"
    return sampled_gaussian(sigma, rate, interval, relation)


# Cached for calibration with prior events, which do not change.
@lru_cache(maxsize=8)
def _self_composed(event: Secret, interval: float, relation: str) -> Distribution:
    """Return the distribution of all steps of one mechanism.

    Raises: AccountingRangeError where the mean loss alone is above MAX_EPSILON (RDP did not tell
        how large the grid would become).
    """
    one_step, times = _one_step(event.with_steps(1), interval, relation), _times(event)
    if times == 1 and event.sample_rate == 1:
        return one_step
    if isinstance(event, (UserRowsGaussian, RandomAllocationGaussian)):
        removal = on_grid(directions(one_step)[0])
        mean = times * float(removal.losses @ removal.probabilities)
        if mean > MAX_EPSILON:
            raise RANGE.error(f"epsilon up to {MAX_EPSILON}, got about {mean:.6g}")
    return self_composed(one_step, times)


@lru_cache(maxsize=8)
def _visible(event: SampledRecordRelease, interval: float) -> Distribution:
    """Return the distribution of all samples of one visible mechanism.

    Each has a Gaussian's loss with probability sample_rate, and otherwise exactly none. Mixing in a
    loss of 0 keeps every step pessimistic: 0 is a point of the grid.
    """
    always = PoissonSampledGaussian(event.noise_multiplier, 1.0, 1)
    used = _one_step(always, interval, "zero_out")
    unused = google_pld.identity(value_discretization_interval=interval)
    return self_composed(used.compute_mixture(unused, event.sample_rate), event.steps)


@lru_cache(maxsize=8)
def _outside(event: Event, interval: float, relation: str) -> Distribution:
    """Return dp-accounting's own distribution of one step. Raises: UnsupportedEventError."""
    accountant = PLDAccountant(_RELATIONS[relation], value_discretization_interval=interval)
    dp_event = event.dp_event()
    if dp_event is None or not accountant.supports(dp_event):
        raise UnsupportedEventError(f"dp-accounting's PLD does not know {dp_event!r}.")
    return composed_by(accountant.compose(dp_event))


# -- in closed form --

# Given how often an example took part (which is visible and independent of its contents), its
# privacy loss is normal. So ``delta(epsilon) = sum over numbers of uses of P(number)
# delta_Gauss(epsilon; mu of the number)``, with no grid and no FFT: the definition itself is
# computed, up to rounding. Both directions of zero-out have the same losses.

# Participation counts whose probabilities add up to less than this are left out; it is added to
# delta instead.
_TAIL = 1e-30


def _has_closed_form(composition: Composition) -> bool:
    """Return whether nothing is secret or searched, and at most one rate and noise is visible."""
    one_visible = len(composition.of(SampledRecordRelease)) <= 1
    return composition.kinds <= {POISSON, VISIBLE} and not composition.sampled and one_visible


def _closed_form(composition: Composition, delta: float, scale: float = 1.0) -> float:
    """Return the smallest epsilon >= 0 at ``delta``, rounded up, to a relative 1e-9.

    Args: scale: a factor on every Gaussian's sensitivity (2 under replace_one).
    """
    log_weights, mus = _participations(composition, scale)

    def excess(value: float) -> float:
        total = np.logaddexp(logsumexp(log_weights + _log_delta(value, mus)), math.log(_TAIL))
        return float(total) - math.log(delta)

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    root = float(brentq(excess, 0.0, high, xtol=1e-13, rtol=1e-13))
    return root * (1 + 1e-9) + 1e-12


def _participations(composition: Composition, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probability and mu of each number of uses."""
    always = (composition.gaussian_mu * scale) ** 2
    if not (visible := composition.of(SampledRecordRelease)):
        return np.zeros(1), np.array([math.sqrt(always)])
    (event,) = visible
    law = binom(event.steps, event.sample_rate)
    # Bernstein: the number of uses is further from its mean m than sqrt(2 m L) + L with a
    # probability below exp(-L) on each side. With 1e9 samples, the most that are accepted, fewer
    # than a million numbers of uses remain.
    mean, away = event.steps * event.sample_rate, math.log(2 / _TAIL)
    reach = math.sqrt(2 * mean * away) + away
    low, high = max(0, math.floor(mean - reach)), min(event.steps, math.ceil(mean + reach))
    counts = np.arange(low, high + 1)
    return law.logpmf(counts), np.sqrt(always + counts * (scale / event.noise_multiplier) ** 2)


def _log_delta(value: float, mu: np.ndarray) -> np.ndarray:
    """Return log ``E[(1 - exp(value - loss))+]`` for a normal loss; -inf where mu is 0.

    The loss has mean mu^2 / 2 and variance mu^2. See Balle and Wang 2018, Theorem 8.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        upper = log_ndtr(-value / mu + mu / 2)
        lower = value + log_ndtr(-value / mu - mu / 2)
        normal = upper + np.log(-np.expm1(np.minimum(lower - upper, -1e-300)))
    return np.where((mu > 0) & (lower < upper), normal, -np.inf)
