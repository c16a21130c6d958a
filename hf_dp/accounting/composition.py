"""What a list of events composes to, in the form that all accountants share.

The order of events does not matter to any accountant here (each bounds adaptive composition), so
equal mechanisms are merged, events that touch no example are dropped, and plain Gaussians become a
single one, which is exact.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from hf_dp.accounting import knows
from hf_dp.accounting.event import Event, as_events, refuse_stranger
from hf_dp.accounting.events import BestOfRandomRuns, PoissonSampledGaussian
from hf_dp.errors import AccountingRangeError, UnsupportedEventError

_E = TypeVar("_E", bound=Event)

Restriction = tuple[str, tuple[str, ...], str]


@dataclass(frozen=True)
class Composition:
    """The canonical form of a list of events.

    Attributes:
        noiseless: an example entered some step without noise, so no finite epsilon holds.
        events: the distinct mechanisms with noise, in a fixed order, with all of their steps: each
            as :meth:`hf_dp.accounting.Event.canonical` has it.
        outside: likewise, those that are dp-accounting's own, as they are.
        searches: not merged, since two cost more than one with runs as long as both.
        restricted: name, relations and reason for each kind of event restricted to some relations.
    """

    noiseless: bool = False
    events: tuple[Event, ...] = ()
    outside: tuple[Event, ...] = ()
    searches: tuple[BestOfRandomRuns, ...] = ()
    restricted: tuple[Restriction, ...] = ()

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
        for name, relations, why in self.restricted:
            if relation not in relations:
                raise UnsupportedEventError(
                    f"Relation {relation!r} does not hold for {name}: {why} Use "
                    f"relation={relations[0]!r}."
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

    Raises:
        UnsupportedEventError: something in the list is not a registered event; or no neighboring
            relation holds for all of them.
    """
    events = as_events(events)
    for event in events:
        refuse_stranger(event)
    restricted = _restrictions(events)
    if restricted and not set.intersection(*(set(relations) for _, relations, _ in restricted)):
        shown = "; ".join(f"{name}: {', '.join(relations)}" for name, relations, _ in restricted)
        raise UnsupportedEventError(
            f"These events hold under no common neighboring relation ({shown})."
        )
    ran = [event for event in events if event.steps > 0]
    searches = [event for event in ran if isinstance(event, BestOfRandomRuns)]
    runs = {search: compose(search.run) for search in searches}
    outside = [event for event in ran if _is_outside(event)]
    others = (each for each in ran if not (isinstance(each, BestOfRandomRuns) or _is_outside(each)))
    parts = (part for event in others for part in event.canonical())
    merged = _merged(part for part in parts if _rate(part) > 0)  # else nobody takes part
    events = [event for event in merged if 0 not in event.noise_multipliers.values()]
    return Composition(
        noiseless=len(events) < len(merged)
        or any(0 in event.noise_multipliers.values() for event in outside)
        or any(run.noiseless for run in runs.values()),
        events=tuple(sorted(events, key=_place)),
        outside=tuple(_merged(outside)),
        searches=tuple(search for search in searches if not runs[search].empty),
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


def _restrictions(events: Iterable[Event]) -> tuple[Restriction, ...]:
    """Return name, relations and reason for each kind of event restricted to some relations.

    Events that never ran are included.
    """
    kinds: set[Restriction] = set()
    for event in events:
        for each in event.run if isinstance(event, BestOfRandomRuns) else (event,):
            if each.restriction:
                kinds.add((type(each).__name__, each.relations, each.restriction))
    return tuple(sorted(kinds))
