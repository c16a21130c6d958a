"""What a list of events composes to, in the form that all accountants share.

The order of events does not matter to any accountant here (each bounds adaptive composition), so
equal mechanisms are merged, events that touch no example are dropped, and plain Gaussians become a
single one, which is exact.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from hf_dp.accounting import knows
from hf_dp.accounting.event import EVENT_TYPES, Event, NoisedSum, as_events
from hf_dp.accounting.events import (
    BestOfRandomRuns,
    RandomAllocationGaussian,
    TruncatedPoissonSampledGaussian,
    UserRowsGaussian,
)
from hf_dp.accounting.record_events import (
    PublishedForwardNoise,
    RandomizedResponse,
    RecordRelease,
    SampledRecordRelease,
    SumAndRows,
)
from hf_dp.errors import UnsupportedEventError

_NO_CUT = 1e-300


class SampledTerm(NamedTuple):
    """A Poisson-sampled Gaussian with 0 < sample_rate < 1, noise_multiplier > 0 and steps > 0."""

    noise_multiplier: float
    sample_rate: float
    steps: int


class TruncatedTerm(NamedTuple):
    """A truncated one with 0 < sample_rate <= 1, noise_multiplier > 0 and steps > 0.

    Truncation can happen; otherwise it is a :class:`SampledTerm`.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int
    num_examples: int
    max_batch_size: int


class UserRowsTerm(NamedTuple):
    """Sampled rows, up to ``max_rows`` > 1 of one user, with 0 < sample_rate < 1,
    noise_multiplier > 0 and steps > 0."""

    noise_multiplier: float
    sample_rate: float
    steps: int
    max_rows: int


class AllocatedTerm(NamedTuple):
    """Random allocations of ``steps_per_allocation`` steps each, with noise_multiplier > 0 and
    ``allocations`` > 0."""

    noise_multiplier: float
    steps_per_allocation: int
    allocations: int

    @property
    def steps(self) -> int:
        """Those of all allocations."""
        return self.steps_per_allocation * self.allocations

    @property
    def sample_rate(self) -> float:
        """The probability with which an example takes part in a given step."""
        return 1 / self.steps_per_allocation


class VisibleTerm(NamedTuple):
    """A Gaussian in which an example visibly takes part with probability ``sample_rate``.

    There are ``steps`` samples, with 0 < sample_rate <= 1.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int


class ResponseTerm(NamedTuple):
    """A randomized response among ``num_classes``, run ``steps`` times."""

    epsilon: float
    num_classes: int
    steps: int


class PublishedTerm(NamedTuple):
    """DP-FP as published, for which no bound is known; ``steps`` counts micro-batches."""

    noise_multiplier: float
    sample_rate: float
    steps: int


class OutsideTerm(NamedTuple):
    """An event from outside hf_dp, as dp-accounting's own of one step, and how many times."""

    dp_event: Any
    steps: int


class SearchTerm(NamedTuple):
    """The best of randomly many runs.

    ``shape`` is that of the truncated negative binomial, or None for Poisson.
    """

    run: Composition
    mean_runs: float
    shape: float | None

    @property
    def steps(self) -> int:
        """Those of one run."""
        return self.run.steps


_FIELDS: dict[type, str] = {
    SampledTerm: "sampled",
    TruncatedTerm: "truncated",
    UserRowsTerm: "user_rows",
    AllocatedTerm: "allocated",
    VisibleTerm: "visible",
    ResponseTerm: "responses",
    PublishedTerm: "published",
}
_KINDS = {
    "sampled": knows.POISSON,
    "truncated": knows.TRUNCATED,
    "user_rows": knows.USER_ROWS,
    "allocated": knows.ALLOCATION,
    "visible": knows.VISIBLE,
    "responses": knows.RESPONSE,
    "published": knows.PUBLISHED,
    "outside": knows.OUTSIDE,
    "searches": knows.SEARCH,
}


@dataclass(frozen=True)
class Composition:
    """The canonical form of a list of events.

    Attributes:
        gaussian_mu: sensitivity / standard deviation of the one Gaussian that all unsampled ones
            compose to, sqrt(sum steps / noise_multiplier^2) (Dong, Roth, Su 2019, Corollary 3.3); 0
            if there are none.
        noiseless: an example entered some step without noise, so no finite epsilon holds.
        noise_multipliers, sample_rates, steps: what ran, for range checks; unsampled mechanisms are
            included with rate 1, and a search with those of one run.
        sampled, truncated, user_rows, allocated: the distinct mechanisms on secret samples, sorted,
            with their total steps.
        visible, responses, published: mechanisms that release something about each example by
            itself.
        outside, searches: the others; not every accountant can describe them.
        restricted: name, relations and reason for each kind of event restricted to some relations.
    """

    gaussian_mu: float = 0.0
    noiseless: bool = False
    noise_multipliers: tuple[float, ...] = ()
    sample_rates: tuple[float, ...] = ()
    steps: int = 0
    sampled: tuple[SampledTerm, ...] = ()
    truncated: tuple[TruncatedTerm, ...] = ()
    user_rows: tuple[UserRowsTerm, ...] = ()
    allocated: tuple[AllocatedTerm, ...] = ()
    visible: tuple[VisibleTerm, ...] = ()
    responses: tuple[ResponseTerm, ...] = ()
    published: tuple[PublishedTerm, ...] = ()
    outside: tuple[OutsideTerm, ...] = ()
    searches: tuple[SearchTerm, ...] = ()
    restricted: tuple[tuple[str, tuple[str, ...], str], ...] = ()

    @property
    def kinds(self) -> frozenset[str]:
        """What ran with noise, as :mod:`hf_dp.accounting.knows` names it, runs of searches
        included."""
        found = {kind for name, kind in _KINDS.items() if getattr(self, name)}
        if self.gaussian_mu > 0:
            found.add(knows.POISSON)
        return frozenset(found).union(*(search.run.kinds for search in self.searches))

    @property
    def empty(self) -> bool:
        """Whether nothing that ran depends on an example, so that epsilon is exactly 0."""
        return not self.kinds and not self.noiseless

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


def compose(events: Event | Iterable[Event]) -> Composition:
    """Merge one event or several into their canonical form.

    Raises:
        UnsupportedEventError: something in the list is not a registered event; or no neighboring
            relation holds for all of them.
    """
    events = as_events(events)
    for event in events:
        # Exact classes: a subclass could mean another mechanism.
        if type(event) not in EVENT_TYPES.values():
            raise UnsupportedEventError(
                f"Expected events of types {list(EVENT_TYPES)}, got {event!r} of type "
                f"{type(event)}."
            )
    restricted = _restrictions(events)
    if restricted and not set.intersection(*(set(relations) for _, relations, _ in restricted)):
        shown = "; ".join(f"{name}: {', '.join(relations)}" for name, relations, _ in restricted)
        raise UnsupportedEventError(
            f"These events hold under no common neighboring relation ({shown})."
        )
    return dataclasses.replace(
        _composition([event for event in events if event.steps > 0]), restricted=restricted
    )


def _restrictions(events: Iterable[Event]) -> tuple[tuple[str, tuple[str, ...], str], ...]:
    """Return name, relations and reason for each kind of event restricted to some relations.

    Events that never ran are included.
    """
    kinds: dict[str, tuple[str, tuple[str, ...], str]] = {}
    for event in events:
        for each in event.run if isinstance(event, BestOfRandomRuns) else (event,):
            cls = type(each)
            if cls.restriction:
                kinds[cls.__name__] = (cls.__name__, cls.relations, cls.restriction)
    return tuple(kinds[name] for name in sorted(kinds))


def _cuts(event: TruncatedPoissonSampledGaussian) -> bool:
    """Return whether a sample is truncated with more than a negligible probability.

    If one step's sample is truncated with probability t, T steps are within total variation T t of
    T plain ones, so what is (e, d)-private without truncation is (e, d + (1 + exp(e)) T t)-private
    with it: at t = 1e-300, T = 1e9 and e = 500, that is d + 1e-74. (Below that, tails underflow and
    dp-accounting divides by them.)
    """
    if event.max_batch_size >= event.num_examples:
        return False
    # Imported here because it takes half a second: `import hf_dp.accounting` should not need it.
    from scipy.special import bdtrc

    # P(K >= max)
    return bool(bdtrc(event.max_batch_size - 1, event.num_examples, event.sample_rate) > _NO_CUT)


# A term without its count, and how many times it ran.
_Counted = tuple[type, tuple[Any, ...], int]


def _counted(event: Event) -> Iterator[_Counted]:
    """Yield the terms of an event that ran, each as its class, its fields but the count, and the
    count."""
    match event:
        case RandomizedResponse():
            yield ResponseTerm, (event.epsilon, event.num_classes), event.steps
        case RecordRelease():
            yield SampledTerm, (event.noise_multiplier, 1.0), event.steps
        case SumAndRows(one_draw=True):
            yield VisibleTerm, (event.joint_noise_multiplier, event.sample_rate), event.steps
        case SumAndRows():
            yield SampledTerm, (event.noise_multiplier, event.sample_rate), event.steps
            yield VisibleTerm, (event.record_noise_multiplier, event.sample_rate), event.steps
        case SampledRecordRelease() | PublishedForwardNoise():
            kind = VisibleTerm if isinstance(event, SampledRecordRelease) else PublishedTerm
            draws = event.steps * event.num_micro_batches
            yield kind, (event.noise_multiplier, event.sample_rate), draws
        case NoisedSum():
            yield _of_a_sum(event)


def _of_a_sum(event: NoisedSum) -> _Counted:
    sigma, rate = event.joint_noise_multiplier, getattr(event, "sample_rate", 1.0)
    match event:
        case RandomAllocationGaussian():
            of_one = event.steps_per_allocation
            return AllocatedTerm, (sigma, of_one), event.steps // of_one
        case TruncatedPoissonSampledGaussian() if rate > 0 and _cuts(event):
            return (
                TruncatedTerm,
                (sigma, rate, event.num_examples, event.max_batch_size),
                event.steps,
            )
        case UserRowsGaussian() if rate == 1:
            return SampledTerm, (sigma / event.max_rows, 1.0), event.steps
        case UserRowsGaussian() if event.max_rows > 1:
            return UserRowsTerm, (sigma, rate, event.max_rows), event.steps
        case _:
            return SampledTerm, (sigma, rate), event.steps


def _composition(events: Iterable[Event]) -> Composition:
    """Return the canonical form of events that ran."""
    counts: Counter[tuple[type, tuple[Any, ...]]] = Counter()
    outside, searches = [], []
    for event in events:
        if isinstance(event, BestOfRandomRuns):
            if not (run := compose(event.run)).empty:
                searches.append(SearchTerm(run, event.mean_runs, event.shape))
        elif (dp_event := event.dp_event()) is not None:
            times = event.steps // event.with_steps(1).steps
            outside.append((OutsideTerm(dp_event, times), event.noise_multipliers))
        else:
            for cls, key, count in _counted(event):
                counts[cls, key] += count if key[1] else 0  # at rate 0 nobody takes part
    terms: dict[type, list[Any]] = {cls: [] for cls in _FIELDS}
    for (cls, key), count in sorted(counts.items(), key=lambda item: item[0][1]):
        if count and key[0] > 0:
            terms[cls].append(cls(*key[:2], count, *key[2:]))
    drawn = [term for cls, found in terms.items() if cls is not ResponseTerm for term in found]
    runs = [search.run for search in searches]
    sampled = terms.pop(SampledTerm)
    return Composition(
        gaussian_mu=math.sqrt(
            math.fsum(steps / sigma**2 for sigma, rate, steps in sampled if rate == 1)
        ),
        noiseless=any(count and key[0] == 0 for (_, key), count in counts.items())
        or any(0 in sigmas.values() for _, sigmas in outside)
        or any(run.noiseless for run in runs),
        noise_multipliers=(
            *(term.noise_multiplier for term in drawn),
            *(sigma for _, sigmas in outside for sigma in sigmas.values()),
            *(sigma for run in runs for sigma in run.noise_multipliers),
        ),
        sample_rates=(
            *(term.sample_rate for term in drawn),
            *(rate for run in runs for rate in run.sample_rates),
        ),
        steps=sum(
            term.steps
            for found in (*terms.values(), sampled, [term for term, _ in outside], searches)
            for term in found
        ),
        sampled=tuple(term for term in sampled if term.sample_rate < 1),
        outside=tuple(term for term, _ in outside),
        searches=tuple(searches),
        **{_FIELDS[cls]: tuple(sorted(found)) for cls, found in terms.items()},
    )
