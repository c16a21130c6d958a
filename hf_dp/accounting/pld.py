"""Privacy-loss distributions with Google's ``dp-accounting``: the default accountant.

It is tight and has no error setting to misuse. A step's privacy loss is put on a grid by the
pessimistic connect-the-dots rule (Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022, arXiv
2207.04380) and composed by FFT; both directions of zero-out are computed, and the worse one counts.
The result is min(PLD + SLACK, RDP). Both are upper bounds; RDP is tighter in a few corners (few
steps of very weak mechanisms, where the grid is coarser than the loss). RDP does not know
replace-one, truncated samples and allocations, so there the result is PLD + SLACK. Where no sample
is secret, the loss is a mixture of normals and needs no grid
(:mod:`hf_dp.accounting.gaussian_mixture`). Rates below SMALL_RATE have a grid of their own and no
slack (:mod:`hf_dp.accounting.small_rates`).
"""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache

import dp_accounting
from dp_accounting.pld import privacy_loss_distribution as google_pld
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from dp_accounting.privacy_accountant import NeighboringRelation

from hf_dp.accounting import gaussian_mixture, rdp, small_rates, tilted
from hf_dp.accounting.allocation import allocated
from hf_dp.accounting.composition import (
    AllocatedTerm,
    Composition,
    ResponseTerm,
    SampledTerm,
    TruncatedTerm,
    UserRowsTerm,
    VisibleTerm,
)
from hf_dp.accounting.grid import composed_by, directions, epsilon_at, on_grid, self_composed
from hf_dp.accounting.one_step import sampled_gaussian
from hf_dp.accounting.ranges import Range
from hf_dp.accounting.user_rows import sampled_rows
from hf_dp.accounting.value import Epsilon
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

# Below this delta the plain composition is not an upper bound: FFT rounding makes it too small by
# 2e-3 at 1e-9 and by 0.014 at 1e-10. There, tilted distributions are composed, three times as slow.
TILTED_BELOW = 1e-8

# Truncated samples, visible samples and replace-one have heavier tails, where FFT rounding takes
# more: at noise 0.3, rate 1e-5 and delta 1e-8 the result is 0.003 too small after 1e5 steps and
# 0.015 after 9e5 (against a tilted FFT of the same pair); 2.2e-4 at delta 1e-7 and 1e5 steps. RDP
# cannot replace it for truncated samples and replace-one.
HEAVY_TAILS = dataclasses.replace(
    RANGE,
    min_sample_rate=SMALL_RATE,
    max_steps=10**5,
    min_delta=1e-7,
    next_move='For visible samples, use accountant="rdp". No other accountant describes truncated '
    "samples or replace-one.",
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

# Twice the largest measured error: FFT rounding makes the grid's result too small by at most 4.3e-4
# at delta 1e-8 and 1e5 steps (noise 0.3, rate 1e-5), and by 4.7e-4 at delta 1e-8 and 1e6 steps
# (against prv-accountant's estimate).
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


@lru_cache(maxsize=8)
def _one_step(
    noise_multiplier: float, sample_rate: float, interval: float, relation: str
) -> google_pld.PrivacyLossDistribution:
    """Return the distribution of one step.

    It is cached: building it is most of the work, and a run asks again with more steps.
    """
    if sample_rate < 1 and relation != "replace_one":
        return sampled_gaussian(noise_multiplier, sample_rate, interval)
    return google_pld.from_gaussian_mechanism(
        noise_multiplier,
        sampling_prob=sample_rate,
        value_discretization_interval=interval,
        neighboring_relation=_RELATIONS[relation],
    )


@lru_cache(maxsize=8)
def _one_truncated_step(
    term: TruncatedTerm, interval: float, relation: str
) -> google_pld.PrivacyLossDistribution:
    return google_pld.from_truncated_subsampled_gaussian_mechanism(
        dataset_size=term.num_examples,
        sampling_probability=term.sample_rate,
        truncated_batch_size=term.max_batch_size,
        noise_multiplier=term.noise_multiplier,
        value_discretization_interval=interval,
        neighboring_relation=_RELATIONS[relation],
    )


@lru_cache(maxsize=8)
def _one_step_of_rows(term: UserRowsTerm, interval: float) -> google_pld.PrivacyLossDistribution:
    return sampled_rows(term.noise_multiplier, term.sample_rate, term.max_rows, interval)


@lru_cache(maxsize=32)
def _one_allocation(term: AllocatedTerm, interval: float) -> google_pld.PrivacyLossDistribution:
    return allocated(term.noise_multiplier, term.steps_per_allocation, interval)


@lru_cache(maxsize=8)
def _self_composed(
    term: SampledTerm | TruncatedTerm | UserRowsTerm | AllocatedTerm, interval: float, relation: str
) -> google_pld.PrivacyLossDistribution:
    """Return the distribution of all steps of one mechanism.

    It is cached for calibration with prior events, which do not change.
    """
    if isinstance(term, AllocatedTerm):
        one_step = _one_allocation(term._replace(allocations=1), interval)
        _refuse_too_large(one_step, term.allocations)
        return self_composed(one_step, term.allocations)
    if isinstance(term, TruncatedTerm):
        one_step = _one_truncated_step(term._replace(steps=1), interval, relation)
    elif isinstance(term, UserRowsTerm):
        one_step = _one_step_of_rows(term._replace(steps=1), interval)
        _refuse_too_large(one_step, term.steps)
    else:
        one_step = _one_step(term.noise_multiplier, term.sample_rate, interval, relation)
    return self_composed(one_step, term.steps)


def _refuse_too_large(one_step: google_pld.PrivacyLossDistribution, steps: int) -> None:
    """Raise AccountingRangeError where the mean loss alone is above MAX_EPSILON."""
    removal = on_grid(directions(one_step)[0])
    mean = steps * float(removal.losses @ removal.probabilities)
    if mean > MAX_EPSILON:
        raise RANGE.error(f"epsilon up to {MAX_EPSILON}, got about {mean:.6g}")


@lru_cache(maxsize=8)
def _visible(term: VisibleTerm, interval: float) -> google_pld.PrivacyLossDistribution:
    """Return the distribution of all samples of one visible mechanism.

    Each has a Gaussian's loss with probability sample_rate, and otherwise exactly none. Mixing in a
    loss of 0 keeps every step pessimistic: 0 is a point of the grid.
    """
    used = _one_step(term.noise_multiplier, 1.0, interval, "zero_out")
    unused = google_pld.identity(value_discretization_interval=interval)
    return self_composed(used.compute_mixture(unused, term.sample_rate), term.steps)


@lru_cache(maxsize=8)
def _response(term: ResponseTerm, interval: float) -> google_pld.PrivacyLossDistribution:
    keep = 1 / (1 + (term.num_classes - 1) * math.exp(-term.epsilon))
    # dp-accounting's noise parameter is the probability of an answer drawn from all classes, the
    # true one included.
    noise = (1 - keep) * term.num_classes / (term.num_classes - 1)
    one = google_pld.from_randomized_response(
        noise, term.num_classes, value_discretization_interval=interval
    )
    return self_composed(one, term.steps) if term.steps > 1 else one


@lru_cache(maxsize=8)
def _outside(
    dp_event: dp_accounting.DpEvent, interval: float, relation: str
) -> google_pld.PrivacyLossDistribution:
    """Return dp-accounting's own distribution of one step of an event from outside hf_dp.

    Raises: UnsupportedEventError for one that it does not know.
    """
    accountant = PLDAccountant(_RELATIONS[relation], value_discretization_interval=interval)
    if not accountant.supports(dp_event):
        raise UnsupportedEventError(f"dp-accounting's PLD does not know {dp_event!r}.")
    return composed_by(accountant.compose(dp_event))


def _grid_epsilon(composition: Composition, delta: float, interval: float, relation: str) -> float:
    terms = (
        *composition.sampled,
        *composition.truncated,
        *composition.user_rows,
        *composition.allocated,
    )
    if delta < TILTED_BELOW:
        return _tilted_epsilon(composition, delta, interval, relation)
    parts = [_self_composed(term, interval, relation) for term in terms]
    scale = 2 if relation == "replace_one" else 1  # vectors and labels are another's, not nothing
    parts += [
        _visible(term._replace(noise_multiplier=term.noise_multiplier / scale), interval)
        for term in composition.visible
    ]
    parts += [_response(term, interval) for term in composition.responses]
    parts += [
        self_composed(_outside(term.dp_event, interval, relation), term.steps)
        for term in composition.outside
    ]
    if composition.gaussian_mu > 0:
        parts.append(_one_step(1 / composition.gaussian_mu, 1.0, interval, relation))
    total = parts[0]
    for part in parts[1:]:
        total = total.compose(part)
    return epsilon_at(total, delta)


def _tilted_epsilon(
    composition: Composition, delta: float, interval: float, relation: str
) -> float:
    """Return epsilon for Poisson-sampled and plain Gaussians; HEAVY_TAILS refuses all others."""
    parts = [
        (_one_step(term.noise_multiplier, term.sample_rate, interval, relation), term.steps)
        for term in composition.sampled
    ]
    if composition.gaussian_mu > 0:
        parts.append((_one_step(1 / composition.gaussian_mu, 1.0, interval, relation), 1))
    return tilted.epsilon_at(parts, delta)


def _fine_grid_gain(composition: Composition, order: float) -> float:
    """Return roughly how much epsilon falls from the coarse to the fine grid.

    The coarse grid adds up to COARSE^2 / 4 to the variance of each sampled step's loss. By the
    Chernoff bound at tilt order - 1, that of the best Renyi order, an extra variance V costs
    (order - 1) V / 2 of epsilon. Measured gains were 0.4 to 2 times this. The estimate only decides
    whether to spend the time: both grids give upper bounds.
    """
    steps = sum(term.steps for term in composition.sampled)
    steps += sum(term.steps for term in composition.truncated)
    steps += sum(term.steps for term in composition.user_rows)
    steps += sum(term.allocations for term in composition.allocated)
    return (order - 1) * steps * COARSE**2 / 8


def epsilon(composition: Composition, delta: float, relation: str = "zero_out") -> Epsilon:
    """Return an upper bound on epsilon at ``delta``.

    It takes 0.05 to 0.5 s for a new mechanism and half of that for more steps of a known one; ten
    times as long where the fine grid is worth it (epsilon < 3 and tens of thousands of steps). At
    rates below SMALL_RATE it takes 0.05 to 5 s.

    Raises:
        AccountingRangeError: outside RANGE or above MAX_EPSILON.
    """
    if composition.empty or composition.noiseless:
        return Epsilon(math.inf if composition.noiseless else 0.0, "bound")
    if gaussian_mixture.covers(composition):
        CLOSED_FORM.check(composition, delta)
        return Epsilon(
            gaussian_mixture.epsilon(composition, delta, 2.0 if relation == "replace_one" else 1.0),
            "bound",
        )
    small_rate = min(composition.sample_rates, default=1.0) < SMALL_RATE
    heavy = (
        composition.truncated
        or composition.user_rows
        or composition.allocated
        or composition.visible
        or composition.outside
        or relation == "replace_one"
        or (composition.responses and (delta < TILTED_BELOW or small_rate))
    )
    (ALLOCATED if composition.allocated else HEAVY_TAILS if heavy else RANGE).check(
        composition, delta
    )
    # RDP bounds the plain mechanisms under zero-out; elsewhere it only estimates how large the grid
    # would become.
    no_curve = (
        composition.truncated
        or composition.user_rows
        or composition.allocated
        or composition.outside
    )
    bounded = relation != "replace_one" and not no_curve
    about, order = rdp.epsilon_and_order(composition if bounded else _at_worst(composition), delta)
    if about > MAX_EPSILON and not composition.user_rows and not composition.allocated:
        raise RANGE.error(f"epsilon up to {MAX_EPSILON}, got about {about:.6g}")
    if small_rate:
        terms = composition.sampled
        if composition.gaussian_mu > 0:
            terms += (SampledTerm(1 / composition.gaussian_mu, 1.0, 1),)
        return Epsilon(small_rates.epsilon(terms, delta, about), "bound")
    value = _grid_epsilon(composition, delta, COARSE, relation)
    if value < FINE_BELOW and _fine_grid_gain(composition, order) > WORTHWHILE_GAIN:
        value = min(value, _grid_epsilon(composition, delta, FINE, relation))
    if composition.allocated and math.isinf(value):
        raise ALLOCATED.error("more noise, or more steps per allocation, than were given")
    return Epsilon(min(value + SLACK, about if bounded else math.inf), "bound")


def _at_worst(composition: Composition) -> Composition:
    """Return the steps as if one example moved each sum by 2 C, no sample were truncated, no user
    had several rows, and allocations were Poisson samples."""
    terms = [
        *composition.sampled,
        *(SampledTerm(*term[:3]) for term in composition.truncated),
        *(SampledTerm(*term[:3]) for term in composition.user_rows),
        *(
            SampledTerm(term.noise_multiplier, 1 / term.steps_per_allocation, term.steps)
            for term in composition.allocated
        ),
    ]
    return dataclasses.replace(
        composition,
        sampled=tuple(term._replace(noise_multiplier=term.noise_multiplier / 2) for term in terms),
        gaussian_mu=2 * composition.gaussian_mu,
        visible=tuple(
            term._replace(noise_multiplier=term.noise_multiplier / 2)
            for term in composition.visible
        ),
        truncated=(),
        user_rows=(),
        allocated=(),
        outside=(),
    )
