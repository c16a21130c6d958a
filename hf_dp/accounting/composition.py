"""What accountants are given, and what they return.

The order of events does not matter to any accountant here (each bounds adaptive composition), so
equal mechanisms are merged, events that touch no example are dropped, and plain Gaussians become a
single one, which is exact.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import Literal, TypeVar, get_args

from hf_dp._validate import one_of
from hf_dp.accounting import knows
from hf_dp.accounting.event import Event, as_events, refuse_stranger
from hf_dp.accounting.events import BestOfRandomRuns, PoissonSampledGaussian
from hf_dp.errors import AccountingRangeError, InvalidArgumentError, UnsupportedEventError

_E = TypeVar("_E", bound=Event)

Kind = Literal["bound", "estimate", "not established"]
# From this delta on, warnings and cards mention it: 1 in 10,000.
LARGE_DELTA = 1e-4
KINDS: tuple[Kind, ...] = get_args(Kind)


def round_up(value: float, digits: int = 3) -> float:
    """Return the smallest number with ``digits`` decimals that is not below ``value``, so that the
    sentence "this run is (epsilon, delta)-DP" stays true; in decimal on the shortest form of the
    float: 2.41 stays 2.41 although its binary value is a little above.
    """
    # Larger floats are whole numbers, and soon longer than a decimal of 28 digits.
    if not abs(value) < 2**53:
        return value
    return float(
        Decimal(repr(float(value))).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_CEILING)
    )


def doubt_of_delta(delta: float, of_plan: str = "") -> str:
    """Return why a delta is large, with a next move; empty if it is not.

    Args: of_plan: :attr:`hf_dp.plans.privacy.PrivacyPlan.of_delta`.
    """
    if delta < LARGE_DELTA:
        return ""
    return (
        f"delta is {delta:.3g}{of_plan}. It is roughly the chance that the guarantee fails "
        f"altogether. Far less than {LARGE_DELTA:g} is customary. For a new run set "
        "target_delta=1e-5."
    )


@dataclass(frozen=True)
class Epsilon:
    """The result of an accountant.

    Args:
        value: epsilon >= 0, possibly infinite.
        kind: "bound" if the events are (value, delta)-DP; "estimate" if the value may be below the
            true epsilon; "not established" if it follows from assumptions that do not hold for what
            ran (DP-FP as published).
        estimate: the accountant's point estimate beside its bound (``prv`` has one), or None.
    """

    value: float
    kind: Kind
    estimate: float | None = None

    def __post_init__(self) -> None:
        one_of("kind", self.kind, KINDS)
        if math.isnan(self.value) or self.value < 0:
            raise InvalidArgumentError(f"Expected an epsilon >= 0, got {self.value!r}.")
        # Never a numpy scalar: the value is printed and written to JSON.
        object.__setattr__(self, "value", float(self.value))

    def rounded_up(self, digits: int = 3) -> float:
        """Return ``value`` as it is printed: rounded up, never to nearest."""
        return round_up(self.value, digits)


@dataclass(frozen=True)
class Composition:
    """The canonical form of a list of events.

    Attributes:
        noiseless: an example entered some step without noise, so no finite epsilon holds.
        events: the distinct mechanisms with noise, in a fixed order, with all of their steps: each
            as :meth:`hf_dp.accounting.Event.canonical` has it.
        outside: likewise, those that are dp-accounting's own, as they are.
        searches: not merged, since two cost more than one with runs as long as both.
        restricted: the classes of events that hold under some relations only.
    """

    noiseless: bool = False
    events: tuple[Event, ...] = ()
    outside: tuple[Event, ...] = ()
    searches: tuple[BestOfRandomRuns, ...] = ()
    restricted: tuple[type[Event], ...] = ()

    def of(self, kind: type[_E]) -> tuple[_E, ...]:
        """Return the events of this class."""
        return tuple(event for event in self.events if isinstance(event, kind))

    @property
    def sampled(self) -> tuple[PoissonSampledGaussian, ...]:
        """The Gaussians on Poisson samples at rates below 1."""
        return tuple(each for each in self.of(PoissonSampledGaussian) if each.sample_rate < 1)

    @property
    def gaussian_mu(self) -> float:
        """Sensitivity / standard deviation of the one Gaussian that all unsampled ones compose to,
        sqrt(sum steps / noise_multiplier^2) (Dong, Roth, Su 2019, Corollary 3.3); 0 if there are
        none."""
        plain = (each for each in self.of(PoissonSampledGaussian) if each.sample_rate == 1)
        return math.sqrt(math.fsum(each.steps / each.noise_multiplier**2 for each in plain))

    @property
    def noise_multipliers(self) -> tuple[float, ...]:
        """All that ran, those of one run of a search included."""
        events = (*self.events, *self.outside)
        own = (sigma for event in events for sigma in event.noise_multipliers.values())
        return (*own, *(sigma for run in self._runs for sigma in run.noise_multipliers))

    @property
    def sample_rates(self) -> tuple[float, ...]:
        """All that ran, 1 for unsampled mechanisms, those of one run of a search included; events
        from outside need not have one."""
        own = (_rate(event) for event in self.events)
        return (*own, *(rate for run in self._runs for rate in run.sample_rates))

    @property
    def steps(self) -> int:
        """All steps that ran, of a search those of one run."""
        return sum(event.steps for event in (*self.events, *self.outside, *self.searches))

    @property
    def kinds(self) -> frozenset[str]:
        """What ran with noise, as :mod:`hf_dp.accounting.knows` names it, runs of searches
        included."""
        own = {type(event).__name__ for event in (*self.events, *self.searches)}
        outside = {knows.OUTSIDE} if self.outside else set()
        return frozenset(own | outside).union(*(run.kinds for run in self._runs))

    @property
    def empty(self) -> bool:
        """Whether nothing that ran depends on an example, so that epsilon is exactly 0."""
        return not self.kinds and not self.noiseless

    @property
    def _runs(self) -> tuple[Composition, ...]:
        return tuple(compose(search.run) for search in self.searches)

    def refuse(self, accountant: str, relation: str) -> None:
        """Raise UnsupportedEventError for a relation or kind of event that this accountant does not
        know, with the next move."""
        for cls in self.restricted:
            if relation not in cls.relations:
                raise UnsupportedEventError(
                    f"Relation {relation!r} does not hold for {cls.__name__}: {cls.restriction} "
                    f"Use relation={cls.relations[0]!r}."
                )
        replaced = {knows.REPLACE_ONE} if relation == "replace_one" else set()
        knows.refuse_unknown(accountant, self.kinds | replaced)


@dataclass(frozen=True)
class Range:
    """The limits, both ends included, within which an accountant is known to be right.

    Args:
        accountant: its name, for messages.
        min_noise_multiplier, max_noise_multiplier: noise standard deviation / clipping norm, of
            every event.
        min_sample_rate: Poisson probability, of every event.
        max_steps: steps of all events together.
        min_delta: delta.
        next_move: what a message advises.
    """

    accountant: str
    min_noise_multiplier: float
    max_noise_multiplier: float
    min_sample_rate: float
    max_steps: int
    min_delta: float
    next_move: str

    def check(self, composition: Composition, delta: float) -> None:
        """Raise AccountingRangeError, with value, limit and next move, for anything outside."""
        for sigma in composition.noise_multipliers:
            if not self.min_noise_multiplier <= sigma <= self.max_noise_multiplier:
                limits = f"[{self.min_noise_multiplier}, {self.max_noise_multiplier}]"
                raise self.error(f"`noise_multiplier` in {limits}, got {sigma!r}")
        for rate in composition.sample_rates:
            if rate < self.min_sample_rate:
                raise self.error(f"`sample_rate` >= {self.min_sample_rate}, got {rate!r}")
        if composition.steps > self.max_steps:
            raise self.error(f"at most {self.max_steps} `steps`, got {composition.steps}")
        if delta < self.min_delta:
            raise self.error(f"`delta` >= {self.min_delta}, got {delta!r}")

    def error(self, what: str, next_move: str = "") -> AccountingRangeError:
        """Return the error for one violated limit; the caller raises it."""
        return AccountingRangeError(
            f"Accountant {self.accountant!r} is known to be right for {what}. "
            f"{next_move or self.next_move}"
        )


def compose(events: Event | Iterable[Event]) -> Composition:
    """Merge one event or several into their canonical form.

    Raises: UnsupportedEventError for what is no registered event, and where no neighboring relation
        holds for all.
    """
    events = as_events(events)
    for event in events:
        refuse_stranger(event)
    searches = [event for event in events if isinstance(event, BestOfRandomRuns)]
    each = [*events, *(event for search in searches for event in search.run)]  # never run or not
    classes = {type(event) for event in each if event.restriction}
    restricted = tuple(sorted(classes, key=lambda cls: cls.__name__))
    if restricted and not set.intersection(*(set(cls.relations) for cls in restricted)):
        shown = "; ".join(f"{cls.__name__}: {', '.join(cls.relations)}" for cls in restricted)
        raise UnsupportedEventError(
            f"These events hold under no common neighboring relation ({shown})."
        )
    runs = {search: compose(search.run) for search in searches if search.steps > 0}
    others = [event for event in events if event.steps > 0 and event not in searches]
    outside = [event for event in others if _is_outside(event)]
    parts = [part for event in others if event not in outside for part in event.canonical()]
    merged = _merged(part for part in parts if _rate(part) > 0)  # else nobody takes part
    noisy = [event for event in merged if 0 not in event.noise_multipliers.values()]
    return Composition(
        noiseless=len(noisy) < len(merged)
        or any(0 in event.noise_multipliers.values() for event in outside)
        or any(run.noiseless for run in runs.values()),
        events=tuple(sorted(noisy, key=_place)),
        outside=tuple(_merged(outside)),
        searches=tuple(each for each in searches if each in runs and not runs[each].empty),
        restricted=restricted,
    )


def _is_outside(event: Event) -> bool:
    """Return whether it is not hf_dp's, be it a subclass of an event that is."""
    return not type(event).__module__.startswith("hf_dp.")


def _merged(events: Iterable[Event]) -> list[Event]:
    steps: Counter[Event] = Counter()
    for event in events:
        steps[event.with_steps(1)] += event.steps
    return [one.with_steps(count) for one, count in steps.items()]


def _rate(event: Event) -> float:
    """Return the probability with which an example takes part in a step."""
    return float(getattr(event, "sample_rate", 1.0))


def _place(event: Event) -> tuple[object, ...]:
    name, noise = type(event).__name__, tuple(event.noise_multipliers.values())
    return (name, noise, _rate(event), repr(event))
