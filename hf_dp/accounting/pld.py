"""Privacy-loss distributions with Google's ``dp-accounting``: the default, tight, and with no error setting to misuse.

A step's privacy loss is put on a grid by the pessimistic connect-the-dots rule (Doroshenko, Ghazi, Kamath, Kumar,
Manurangsi 2022, arXiv 2207.04380) and composed by FFT; both directions of zero-out are computed, the worse one counts.
What is reported is min(PLD + SLACK, RDP): both are upper bounds, and RDP is the tighter one in a few corners (few
steps of very weak mechanisms, where the grid is coarser than the loss).
"""

from __future__ import annotations

import math
from functools import lru_cache

from dp_accounting.pld import privacy_loss_distribution as google_pld

from hf_dp.accounting import rdp
from hf_dp.accounting.composition import Composition, SampledTerm
from hf_dp.accounting.ranges import Range
from hf_dp.accounting.value import Epsilon

# Each limit is the edge of what was compared with independent computations (an FFT with exponential tilting up to 1e5
# steps, prv-accountant up to 1e6): noise multipliers from 0.3, rates from 1.48e-5, delta from 1e-8.
# Below delta 1e-8 the "pessimistic" result is not an upper bound: FFT rounding makes it too small by 2e-3 at 1e-9 and
# by 0.014 at 1e-10. Large noise multipliers only make the result looser, and RDP then caps it.
RANGE = Range(
    "pld",
    min_noise_multiplier=0.3,
    max_noise_multiplier=100.0,
    min_sample_rate=1e-5,
    max_steps=10**6,
    min_delta=1e-8,
    next_move='Use accountant="rdp".',
)

# The grid grows with epsilon: at 433 it needs 1.5 s, at 5e5 more memory than a machine has. No one reads such values.
MAX_EPSILON = 500.0

# FFT rounding makes the grid's result too small by at most 2e-4 at delta 1e-8 and 1e5 steps, and by 4.7e-4 at delta
# 1e-8 and 1e6 steps (against prv-accountant's estimate): twice that.
SLACK = 1e-3

COARSE, FINE = 1e-4, 1e-5

# At and above this epsilon the fine grid was never worth its price (up to 10 times the time and memory).
FINE_BELOW = 3.0

# The fine grid is skipped when it would gain less than about this, half of SLACK.
WORTHWHILE_GAIN = SLACK / 2


@lru_cache(maxsize=8)
def _one_step(noise_multiplier: float, sample_rate: float, interval: float) -> google_pld.PrivacyLossDistribution:
    """The distribution of one step. Cached: building it is most of the work, and a run asks again with more steps."""
    return google_pld.from_gaussian_mechanism(
        noise_multiplier, sampling_prob=sample_rate, value_discretization_interval=interval
    )


@lru_cache(maxsize=8)
def _self_composed(term: SampledTerm, interval: float) -> google_pld.PrivacyLossDistribution:
    """All steps of one mechanism. Cached for calibration next to prior events, which do not change."""
    return _one_step(term.noise_multiplier, term.sample_rate, interval).self_compose(term.steps)


def _grid_epsilon(composition: Composition, delta: float, interval: float) -> float:
    parts = [_self_composed(term, interval) for term in composition.sampled]
    if composition.gaussian_mu > 0:
        parts.append(_one_step(1 / composition.gaussian_mu, 1.0, interval))
    total = parts[0]
    for part in parts[1:]:
        total = total.compose(part)
    return float(total.get_epsilon_for_delta(delta))


def _fine_grid_gain(composition: Composition, order: float) -> float:
    """How much epsilon falls, roughly, from the coarse to the fine grid.

    The coarse grid adds up to COARSE^2 / 4 to the variance of each sampled step's loss. By the Chernoff bound at tilt
    order - 1, the best Renyi order's, extra variance V costs (order - 1) V / 2 of epsilon. Measured gains were 0.4 to
    2 times this. It only decides whether to spend the time: both grids give upper bounds.
    """
    steps = sum(term.steps for term in composition.sampled)
    return (order - 1) * steps * COARSE**2 / 8


def epsilon(composition: Composition, delta: float) -> Epsilon:
    """Upper bound on epsilon at ``delta``; AccountingRangeError outside RANGE or above MAX_EPSILON.

    Time: 0.3 to 2 s for a new mechanism, a third of that for more steps of a known one; ten times as long where the
    fine grid is worth it (epsilon < 3 and tens of thousands of steps).
    """
    if composition.empty or composition.noiseless:
        return Epsilon(math.inf if composition.noiseless else 0.0, "bound")
    RANGE.check(composition, delta)
    by_rdp, order = rdp.epsilon_and_order(composition, delta)
    if by_rdp > MAX_EPSILON:
        raise RANGE.error(f"epsilon up to {MAX_EPSILON}, got about {by_rdp:.6g}")
    value = _grid_epsilon(composition, delta, COARSE)
    if value < FINE_BELOW and _fine_grid_gain(composition, order) > WORTHWHILE_GAIN:
        value = min(value, _grid_epsilon(composition, delta, FINE))
    return Epsilon(min(value + SLACK, by_rdp), "bound")
