"""The smallest noise, or the most steps, that keeps a run inside its budget.

Every answer is checked by evaluating the accountant at exactly the number that is returned: it is
on the private side, or an error is raised. The accountant must be a bound; an estimate cannot be
calibrated to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from decimal import ROUND_CEILING, Decimal

from hf_dp._validate import in_unit_interval, integer, non_negative, one_of, positive
from hf_dp.accounting.accountants import epsilon, load
from hf_dp.accounting.event import Event, as_events
from hf_dp.accounting.events import PoissonSampledGaussian
from hf_dp.accounting.knows import BOUNDS
from hf_dp.errors import AccountingRangeError, CalibrationError, UnsupportedEventError

# The returned noise multiplier exceeds the smallest sufficient one by at most this fraction.
TOLERANCE = 1e-4

# Digits of the returned noise multiplier, so that the number published is the number used.
SIGNIFICANT_DIGITS = 6

Point = tuple[float, float]  # a noise multiplier and its gap
Gap = Callable[[float], float]
MakeEvent = Callable[[float, int], Event]

_RATE_HINT = "It is expected_batch_size / num_examples."
_CLT_HINT = "Calibration needs a bound; 'gdp_clt' is an estimate and would give too little noise."


class _Goal:
    """Everything together, prior events included, costs at most ``target`` at ``delta``."""

    def __init__(self, target: float, delta: float, accountant: str, prior_events: Iterable[Event]):
        self.name = one_of("accountant", accountant, BOUNDS, _CLT_HINT)
        self.target = positive("target_epsilon", target)
        self.delta = in_unit_interval("target_delta", delta)
        self.prior = as_events(prior_events)
        self.limits = load(self.name).RANGE

    def gap(self, event: Event | None, *, least: bool = False) -> float:
        """Return log(epsilon / target), where positive means that ``event`` costs too much.

        Epsilon can exceed what the accountant covers: also too much. But where nothing costs less,
        ``least``, the cause is another argument, and the caller must be told.
        """
        events = self.prior if event is None else (*self.prior, event)
        try:
            value = epsilon(events, self.delta, self.name).value
        except AccountingRangeError:
            if least:
                raise
            return math.inf
        if value == 0:
            return -math.inf
        # A quotient that rounds to 1 may hide that the value is larger.
        return math.log(value / self.target) or value - self.target


def calibrate_noise_multiplier(
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    accountant: str = "pld",
    prior_events: Iterable[Event] = (),
    event: MakeEvent | None = None,
) -> float:
    """Return the smallest noise multiplier with which ``steps`` more steps stay inside the target.

    Args:
        target_epsilon: epsilon of everything together, prior events included, > 0.
        target_delta: delta in (0, 1).
        sample_rate: probability with which each example joins a step, in (0, 1].
        steps: number of steps to pay for, >= 1.
        accountant: "pld", "rdp" or "prv".
        prior_events: what already ran on the same data.
        event: ``(noise_multiplier, steps) -> Event``, the event of these steps, such as a sampler's
            ``event``. None: Poisson sampling at ``sample_rate``.

    Returns:
        Noise standard deviation / clipping norm, with SIGNIFICANT_DIGITS digits, such that
        epsilon(prior_events + steps) <= target_epsilon, at most TOLERANCE (relative) above the
        smallest such number. "pld" takes about a second.

    Raises:
        InvalidArgumentError: a value is invalid, or the accountant is not a bound.
        CalibrationError: the target cannot be met, or is met by every noise multiplier that the
            accountant covers.
        AccountingRangeError: the accountant does not cover delta, sample_rate or steps.
    """
    goal = _Goal(target_epsilon, target_delta, accountant, prior_events)
    rate = in_unit_interval("sample_rate", sample_rate, _RATE_HINT, one=True)
    count = integer("steps", steps, 1)
    if (spent := goal.gap(None, least=True)) > 0:
        raise CalibrationError(
            f"The prior events alone cost epsilon {goal.target * math.exp(spent):.6g} > "
            f"target_epsilon {goal.target:.6g} at delta {goal.delta:.6g}. Raise `target_epsilon`."
        )
    make = event or (lambda sigma, count: PoissonSampledGaussian(sigma, rate, count))
    smallest, largest = goal.limits.min_noise_multiplier, goal.limits.max_noise_multiplier

    def gap(sigma: float) -> float:
        return goal.gap(make(sigma, count), least=sigma >= largest)

    # This comes first because it also refuses a delta, rate or number of steps that the accountant
    # does not cover.
    if (most := gap(largest)) > 0:
        raise CalibrationError(
            f"target_epsilon {goal.target:.6g} is not met even at noise multiplier {largest}, the "
            f"most that accountant {goal.name!r} covers (epsilon "
            f"{goal.target * math.exp(most):.6g}). Raise `target_epsilon`, or lower `steps` or "
            "`sample_rate`."
        )
    found = _smallest(gap, _start(goal, rate, count), smallest, largest)
    if found is None:
        raise CalibrationError(
            f"target_epsilon {goal.target:.6g} is met even at noise multiplier {smallest}, the "
            f"least that accountant {goal.name!r} covers. Lower `target_epsilon`, or set "
            "`noise_multiplier` yourself."
        )
    return found


def calibrate_steps(
    target_epsilon: float,
    target_delta: float,
    noise_multiplier: float,
    sample_rate: float,
    accountant: str = "pld",
    prior_events: Iterable[Event] = (),
    event: MakeEvent | None = None,
) -> int:
    """Return the largest number of further sampled steps that stays inside the target.

    Arguments and errors as for :func:`calibrate_noise_multiplier`; ``sample_rate`` may be 0 and
    ``noise_multiplier`` 0.

    Returns:
        A number of steps n >= 0 with epsilon(prior_events + n steps) <= target_epsilon and
        epsilon(n + 1 steps) > target_epsilon; 0 if one step, or the prior events alone, exceed it.

    Raises:
        CalibrationError: the target is not reached within the steps that the accountant covers.
    """
    goal = _Goal(target_epsilon, target_delta, accountant, prior_events)
    sigma = non_negative("noise_multiplier", noise_multiplier)
    rate = in_unit_interval("sample_rate", sample_rate, zero=True, one=True)
    make = event or (lambda noise, count: PoissonSampledGaussian(noise, rate, count))

    def fits(count: int) -> bool:
        return goal.gap(make(sigma, count), least=count < 2) <= 0

    if not fits(0) or not fits(1):
        return 0
    most = goal.limits.max_steps - sum(event.steps for event in goal.prior)
    good, bad = 1, min(2, most)
    while fits(bad):
        if bad == most:
            raise CalibrationError(
                f"All the {most} steps that accountant {goal.name!r} covers stay inside "
                f"target_epsilon {goal.target:.6g} at noise multiplier {sigma:.6g} and sample rate "
                f"{rate:.6g}. Choose the number of steps yourself, or calibrate the noise "
                "multiplier."
            )
        good, bad = bad, min(2 * bad, most)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def _start(goal: _Goal, rate: float, steps: int) -> float:
    """Return where to begin the search: at RDP's answer, or at 1 if it has none.

    RDP takes milliseconds and is close to the other accountants.
    """
    start, limits = 1.0, goal.limits
    if goal.name != "rdp":
        with suppress(AccountingRangeError, CalibrationError, UnsupportedEventError):
            start = calibrate_noise_multiplier(
                goal.target, goal.delta, rate, steps, "rdp", goal.prior
            )
    return min(max(start, limits.min_noise_multiplier), limits.max_noise_multiplier)


def _smallest(gap: Gap, start: float, smallest: float, largest: float) -> float | None:
    """Return the smallest noise multiplier with gap <= 0, rounded up; None if ``smallest`` is one.

    It is searched for from ``start``; ``largest`` is known to be enough.
    """
    point, factor = (start, gap(start)), 1.1
    while point[1] <= 0:
        if point[0] <= smallest:
            return None
        lower = max(point[0] / factor, smallest)
        point, above, factor = (lower, gap(lower)), point, factor**2
        if point[1] > 0:
            return _narrow(gap, point, above)
    while point[1] > 0:
        higher = min(point[0] * factor, largest)
        point, below, factor = (higher, gap(higher)), point, factor**2
    return _narrow(gap, below, point)


def _narrow(gap: Gap, low: Point, high: Point) -> float:
    """Shrink the bracket to TOLERANCE by interpolation; return its upper end, rounded up.

    Probes are placed a little above the interpolated root and then a little below it, so that two
    good guesses end the search. An end that does not move in two rounds has its gap halved (the
    Illinois rule), and late rounds bisect.
    """
    aim = TOLERANCE / 3
    (left, left_gap), (right, right_gap) = low, high
    last, rounds = "", 0
    while round_sigma_up(right) / left - 1 > TOLERANCE:
        rounds += 1
        share = 0.5
        if math.isfinite(left_gap - right_gap) and rounds < 20:
            share = left_gap / (left_gap - right_gap)
        root = left * (right / left) ** min(max(share, 0.0), 1.0)
        probe = root * (1 - aim) if last == "right" else root * (1 + aim)
        if not left * (1 + aim / 2) < probe < right / (1 + aim / 2):
            probe = math.sqrt(left * right)
        value = gap(probe)
        if value > 0:
            left, left_gap = probe, value
            right_gap = right_gap / 2 if last == "left" else right_gap
            last = "left"
        else:
            right, right_gap = probe, value
            left_gap = left_gap / 2 if last == "right" else left_gap
            last = "right"
    answer = round_sigma_up(right)
    # The accountant's result may vary by rounding; only the result at the returned number counts.
    while gap(answer) > 0:
        answer = round_sigma_up(answer * (1 + aim))
    return answer


def round_sigma_up(sigma: float) -> float:
    """Return ``sigma`` rounded up to SIGNIFICANT_DIGITS digits: more noise, so still private."""
    exact = Decimal(repr(sigma))
    unit = Decimal(1).scaleb(exact.adjusted() - SIGNIFICANT_DIGITS + 1)
    return float(exact.quantize(unit, rounding=ROUND_CEILING))
