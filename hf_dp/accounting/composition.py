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
from typing import TYPE_CHECKING, NamedTuple

from hf_dp.accounting import knows
from hf_dp.accounting.event import Event, NoisedSum, as_events, refuse_stranger
from hf_dp.accounting.events import (
    BestOfRandomRuns,
    PublishedForwardNoise,
    RandomAllocationGaussian,
    RandomizedResponse,
    RecordRelease,
    SampledRecordRelease,
    SumAndRows,
    TruncatedPoissonSampledGaussian,
    UserRowsGaussian,
)
from hf_dp.errors import AccountingRangeError, UnsupportedEventError

if TYPE_CHECKING:
    from dp_accounting.dp_event import DpEvent

_NO_CUT = 1e-300


class Term(NamedTuple):
    """Gaussian noise on what examples add that take part with some probability.

    Attributes:
        kind: who takes part, or what is released of each, as :mod:`hf_dp.accounting.knows` has it.
        noise_multiplier: > 0.
        sample_rate: in (0, 1].
        sizes: (num_examples, max_batch_size) of truncated samples, where truncation can happen;
            (max_rows,) above 1 of sampled rows; (steps_per_allocation,) of random allocation.
        steps: how many, > 0; each micro-batch that is released counts as one.
    """

    kind: str
    noise_multiplier: float
    sample_rate: float
    sizes: tuple[int, ...]
    steps: int


class OutsideTerm(NamedTuple):
    """An event from outside hf_dp, as dp-accounting's own of one step, and how many times."""

    dp_event: DpEvent
    noise_multipliers: tuple[float, ...]
    steps: int


class SearchTerm(NamedTuple):
    """The best of randomly many runs; ``shape`` is that of the truncated negative binomial, or None
    for Poisson."""

    run: Composition
    mean_runs: float
    shape: float | None


Restriction = tuple[str, tuple[str, ...], str]


@dataclass(frozen=True)
class Composition:
    """The canonical form of a list of events.

    Attributes:
        noiseless: an example entered some step without noise, so no finite epsilon holds.
        terms: the distinct mechanisms with noise, sorted, with their total steps.
        responses, outside, searches: the others; not every accountant can describe them.
        restricted: name, relations and reason for each kind of event restricted to some relations.
    """

    noiseless: bool = False
    terms: tuple[Term, ...] = ()
    responses: tuple[RandomizedResponse, ...] = ()
    outside: tuple[OutsideTerm, ...] = ()
    searches: tuple[SearchTerm, ...] = ()
    restricted: tuple[Restriction, ...] = ()

    def of(self, *kinds: str) -> tuple[Term, ...]:
        """Return the terms of these kinds."""
        return tuple(term for term in self.terms if term.kind in kinds)

    @property
    def sampled(self) -> tuple[Term, ...]:
        """The Gaussians on Poisson samples at rates below 1."""
        return tuple(term for term in self.of(knows.POISSON) if term.sample_rate < 1)

    @property
    def gaussian_mu(self) -> float:
        """Sensitivity / standard deviation of the one Gaussian that all unsampled ones compose to,
        sqrt(sum steps / noise_multiplier^2) (Dong, Roth, Su 2019, Corollary 3.3); 0 if there are
        none."""
        plain = (term for term in self.of(knows.POISSON) if term.sample_rate == 1)
        return math.sqrt(math.fsum(term.steps / term.noise_multiplier**2 for term in plain))

    @property
    def noise_multipliers(self) -> tuple[float, ...]:
        """All that ran, those of one run of a search included."""
        return (
            *(term.noise_multiplier for term in self.terms),
            *(sigma for term in self.outside for sigma in term.noise_multipliers),
            *(sigma for search in self.searches for sigma in search.run.noise_multipliers),
        )

    @property
    def sample_rates(self) -> tuple[float, ...]:
        """All that ran, 1 for unsampled mechanisms, those of one run of a search included."""
        return (
            *(term.sample_rate for term in self.terms),
            *(rate for search in self.searches for rate in search.run.sample_rates),
        )

    @property
    def steps(self) -> int:
        """All steps that ran, of a search those of one run."""
        counts = [term.steps for term in self.terms]
        counts += [response.steps for response in self.responses]
        counts += [each.steps for each in self.outside]
        return sum(counts) + sum(search.run.steps for search in self.searches)

    @property
    def kinds(self) -> frozenset[str]:
        """What ran with noise, as :mod:`hf_dp.accounting.knows` names it, runs of searches
        included."""
        others = {
            knows.RESPONSE: self.responses,
            knows.OUTSIDE: self.outside,
            knows.SEARCH: self.searches,
        }
        found = {term.kind for term in self.terms} | {kind for kind in others if others[kind]}
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
    return dataclasses.replace(
        _composition([event for event in events if event.steps > 0]), restricted=restricted
    )


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


def _composition(events: Iterable[Event]) -> Composition:
    """Return the canonical form of events that ran."""
    counts: Counter[Term] = Counter()
    responses: Counter[tuple[float, int]] = Counter()
    outside, searches = [], []
    for event in events:
        if isinstance(event, BestOfRandomRuns):
            if not (run := compose(event.run)).empty:
                searches.append(SearchTerm(run, event.mean_runs, event.shape))
        elif isinstance(event, RandomizedResponse):
            responses[event.epsilon, event.num_classes] += event.steps
        elif (dp_event := event.dp_event()) is not None:
            times = event.steps // event.with_steps(1).steps
            outside.append(OutsideTerm(dp_event, tuple(event.noise_multipliers.values()), times))
        else:
            for term in _terms(event):
                if term.sample_rate > 0:  # else nobody takes part
                    counts[term._replace(steps=0)] += term.steps
    return Composition(
        noiseless=any(term.noise_multiplier == 0 for term in counts)
        or any(0 in term.noise_multipliers for term in outside)
        or any(search.run.noiseless for search in searches),
        terms=tuple(
            sorted(
                term._replace(steps=count)
                for term, count in counts.items()
                if term.noise_multiplier > 0
            )
        ),
        responses=tuple(RandomizedResponse(*key, responses[key]) for key in sorted(responses)),
        outside=tuple(outside),
        searches=tuple(searches),
    )


def _terms(event: Event) -> Iterator[Term]:
    """Yield what an event that ran is made of."""
    match event:
        case RecordRelease():
            yield Term(knows.POISSON, event.noise_multiplier, 1.0, (), event.steps)
        case SumAndRows(one_draw=True):
            joint = event.joint_noise_multiplier
            yield Term(knows.VISIBLE, joint, event.sample_rate, (), event.steps)
        case SumAndRows():
            rate, steps = event.sample_rate, event.steps
            yield Term(knows.POISSON, event.noise_multiplier, rate, (), steps)
            yield Term(knows.VISIBLE, event.record_noise_multiplier, rate, (), steps)
        case SampledRecordRelease() | PublishedForwardNoise():
            visible = isinstance(event, SampledRecordRelease)
            kind = knows.VISIBLE if visible else knows.PUBLISHED
            draws = event.steps * event.num_micro_batches
            yield Term(kind, event.noise_multiplier, event.sample_rate, (), draws)
        case NoisedSum():
            yield _of_a_sum(event)


def _of_a_sum(event: NoisedSum) -> Term:
    sigma, rate = event.joint_noise_multiplier, getattr(event, "sample_rate", 1.0)
    kind: str = knows.POISSON
    sizes: tuple[int, ...] = ()
    match event:
        case RandomAllocationGaussian():
            kind, sizes = knows.ALLOCATION, (event.steps_per_allocation,)
        case TruncatedPoissonSampledGaussian() if rate > 0 and _cuts(event):
            kind, sizes = knows.TRUNCATED, (event.num_examples, event.max_batch_size)
        case UserRowsGaussian() if rate == 1:
            sigma /= event.max_rows
        case UserRowsGaussian() if event.max_rows > 1:
            kind, sizes = knows.USER_ROWS, (event.max_rows,)
    return Term(kind, sigma, rate, sizes, event.steps)


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
