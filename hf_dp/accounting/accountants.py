"""The accountants, and the questions that each answers: what did these events cost, what do others
say about them, and which noise, or how many steps, stay inside a budget?"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Decimal
from typing import Protocol, cast

from hf_dp._validate import in_unit_interval, integer, non_negative, one_of, positive
from hf_dp.accounting.composition import Composition, Epsilon, Range, compose, doubt_of_delta
from hf_dp.accounting.event import Event, as_events
from hf_dp.accounting.events import PoissonSampledGaussian
from hf_dp.accounting.knows import ACCOUNTANTS, BOUNDS, KINDS, KNOWS
from hf_dp.errors import AccountingRangeError, CalibrationError, ConfigError, UnsupportedEventError

RELATIONS: tuple[str, ...] = ("zero_out", "add_remove", "replace_one")
"""What a neighboring data set is.

"zero_out" (the default): one example's contribution replaced by nothing, with the number of
examples public. "add_remove": one example more or less; the epsilon is the same, but then nothing
in the run may depend on the number of examples. "replace_one": one example replaced by another.
"""

PAPERS_FIGURE = (
    "{:.3f} is the paper's own figure, under assumptions that do not hold for what ran; it is no "
    "epsilon of this run."
)
ABOVE_A_BOUND = "its estimate is above a bound, which says more"


class Accountant(Protocol):
    """What a module of this package, or an object from outside, offers as an accountant."""

    RANGE: Range

    def epsilon(self, composition: Composition, delta: float, relation: str) -> Epsilon:
        """Return epsilon at ``delta``.

        It is asked only about a composition that has noise, that depends on examples, and all
        kinds of which are in the accountant's row of :mod:`hf_dp.accounting.knows`.

        Raises: AccountingRangeError where the result may be wrong.
        """
        ...


_REGISTERED: dict[str, Accountant] = {}


def register_accountant(
    name: str, accountant: Accountant, kinds: Iterable[str], *, bound: bool
) -> None:
    """Make an accountant known, also to arguments, statements and cards.

    Args:
        kinds: what it bounds, as :mod:`hf_dp.accounting.knows` names it; all else is refused.
        bound: whether its result is an upper bound, so that noise may be calibrated to it.

    Raises: ConfigError for a name that is taken, or for an unknown kind.
    """
    kinds = frozenset(kinds)
    if name in KNOWS or not kinds <= set(KINDS):
        raise ConfigError(
            f"Expected an accountant with a name of its own, of kinds {sorted(KINDS)}, got "
            f"{name!r} of {sorted(kinds)}."
        )
    KNOWS[name] = kinds
    ACCOUNTANTS.append(name)
    if bound:
        BOUNDS.append(name)
    _REGISTERED[name] = accountant


def load(accountant: str) -> Accountant:
    """Return the accountant of this name; raise InvalidArgumentError for an unknown one."""
    name = one_of("accountant", accountant, ACCOUNTANTS)
    if name in _REGISTERED:
        return _REGISTERED[name]
    return cast(Accountant, importlib.import_module(f"hf_dp.accounting.{name}"))


def epsilon(
    events: Event | Iterable[Event],
    delta: float,
    accountant: str = "pld",
    relation: str = "zero_out",
) -> Epsilon:
    """Return the epsilon of one event, or of several composed adaptively.

    Changes nothing, so it may be called at any time, even during a run.

    Args:
        events: what ran, in any order; an empty sequence costs 0.
        delta: in (0, 1); meaningful only well below 1 / number of examples.
        accountant: "pld" (default; min of PLD and RDP), "rdp", "prv" (upper end) or "gdp_clt" (an
            estimate).
        relation: one of RELATIONS; "replace_one" only with "pld".

    Raises:
        InvalidArgumentError: delta, accountant or relation is invalid.
        AccountingRangeError: this accountant is not known to be right here; the message names one
            that is.
        UnsupportedEventError: an event is of an unknown kind, or this accountant does not know it,
            or not under this relation.
    """
    load(accountant)  # raises for an unknown name
    one_of("relation", relation, RELATIONS)
    return _epsilon(accountant, compose(events), in_unit_interval("delta", delta), relation)


# Cached: a log, a card and privacy.json ask the same question of the same ledger.
@functools.lru_cache(maxsize=4096)
def _epsilon(accountant: str, composition: Composition, delta: float, relation: str) -> Epsilon:
    composition.refuse(accountant, relation)
    if composition.empty or composition.noiseless:
        value = math.inf if composition.noiseless else 0.0
        return Epsilon(value, "bound" if accountant in BOUNDS else "estimate")
    return load(accountant).epsilon(composition, delta, relation)


@dataclass(frozen=True)
class Answer:
    """What one accountant says. Where it has no epsilon, ``note`` says why. Where the note is an
    error's text, ``short`` has a few words for it."""

    accountant: str
    epsilon: Epsilon | None
    note: str = ""
    short: str = ""


def compare(
    events: Event | Iterable[Event],
    delta: float,
    accountants: Sequence[str] = ACCOUNTANTS,
    relation: str = "zero_out",
) -> tuple[Answer, ...]:
    """Return one answer for each accountant.

    Arguments and errors are those of :func:`epsilon`, with one exception: an accountant that is out
    of its range, or that cannot describe an event, gives an answer without epsilon, and its note
    says why. So does DP-FP as published; the note then has the paper's figure. An estimate above
    one of the bounds is left out: a bound says more.
    """
    events = as_events(events)
    answers = []
    for name in accountants:
        try:
            value = epsilon(events, delta, name, relation)
        except AccountingRangeError as error:
            answers.append(Answer(name, None, str(error), "outside its range"))
        except UnsupportedEventError as error:
            answers.append(Answer(name, None, str(error), "cannot describe what ran"))
        else:
            if value.kind == "not established":
                answers.append(Answer(name, None, PAPERS_FIGURE.format(value.rounded_up())))
            else:
                answers.append(Answer(name, value))
    values = [answer.epsilon for answer in answers if answer.epsilon is not None]
    least = min((value.value for value in values if value.kind == "bound"), default=math.inf)
    return tuple(_without_estimate_above(least, answer) for answer in answers)


def _without_estimate_above(bound: float, answer: Answer) -> Answer:
    value = answer.epsilon
    if value is None:
        return answer
    if value.kind == "estimate" and value.value > bound:
        return Answer(answer.accountant, None, ABOVE_A_BOUND)
    if value.estimate is not None and value.estimate > bound:
        return replace(answer, epsilon=replace(value, estimate=None))
    return answer


# -- the smallest noise, or the most steps, inside a budget --

# Every answer is checked by evaluating the accountant at exactly the number that is returned: it is
# on the private side, or an error is raised. An estimate cannot be calibrated to.

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
        """Return log(epsilon / target), positive where ``event`` costs too much.

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
        accountant: a bound: "pld", "rdp" or "prv".
        prior_events: what already ran on the same data, and is paid from the same target.
        event: ``(noise_multiplier, steps) -> Event``, the event of these steps, such as a sampler's
            ``event``. None: Poisson sampling at ``sample_rate``.

    Returns:
        Noise standard deviation / clipping norm, with SIGNIFICANT_DIGITS digits. It was itself
        evaluated, so that epsilon(prior_events + steps) <= target_epsilon. It is at most TOLERANCE
        (relative) above the smallest such number that the accountant covers for these events: from
        0.45 with random allocation. "pld" takes about a second, with allocations up to 20.

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
            f"{goal.target * math.exp(most):.6g}). Raise `target_epsilon`, take fewer steps or "
            "epochs, or draw fewer examples in a step."
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

    Arguments and errors are those of :func:`calibrate_noise_multiplier`, but ``sample_rate`` may be
    0 and ``noise_multiplier`` 0.

    Returns:
        A number of steps n >= 0 with epsilon(prior_events + n steps) <= target_epsilon, while
        epsilon(n + 1 steps) is above it, or out of the accountant's range for these events; 0 if
        one step, or the prior events alone, exceed it.

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
    """Return where to begin the search: at RDP's answer, which takes milliseconds and is close, or
    at 1 if it has none."""
    start, limits = 1.0, goal.limits
    if goal.name != "rdp":
        with suppress(AccountingRangeError, CalibrationError, UnsupportedEventError):
            start = calibrate_noise_multiplier(
                goal.target, goal.delta, rate, steps, "rdp", goal.prior
            )
    return min(max(start, limits.min_noise_multiplier), limits.max_noise_multiplier)


def _smallest(gap: Gap, start: float, smallest: float, largest: float) -> float | None:
    """Return the smallest noise multiplier with gap <= 0, rounded up, searched for from ``start``;
    None if ``smallest`` is one. ``largest`` is known to be enough."""
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


def table(answers: Iterable[Answer], delta: float, of_plan: str = "") -> str:
    """Return a line for each accountant under a heading, and :func:`doubt_of_delta`."""
    lines = [f"{'accountant':<11}{'kind':<10}epsilon at delta {delta:g}"]
    for answer in answers:
        found = answer.epsilon
        if found is None:
            lines.append(f"{answer.accountant:<11}{'-':<10}not computed: {answer.note}")
            continue
        point = "" if found.estimate is None else f"  (point estimate {found.estimate:.3f})"
        lines.append(f"{answer.accountant:<11}{found.kind:<10}{found.rounded_up(3):.3f}{point}")
    if doubt := doubt_of_delta(delta, of_plan):
        lines.append(f"Warning: {doubt}")
    return "\n".join(lines)
