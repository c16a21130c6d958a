"""What a list of events composes to, in the form that all accountants share.

The order of events does not matter to any accountant here (each bounds adaptive composition), so
equal mechanisms are merged, events that touch no example are dropped, and plain Gaussians become a
single one, which is exact.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, get_args

from hf_dp.accounting.events import (
    BestOfRandomRuns,
    Event,
    Gaussian,
    PoissonSampledGaussian,
    RandomAllocationGaussian,
    SumAndLoss,
    TruncatedPoissonSampledGaussian,
    UserRowsGaussian,
)
from hf_dp.accounting.record_events import (
    PublishedForwardNoise,
    RandomizedResponse,
    RecordRelease,
    SumAndRows,
)
from hf_dp.errors import UnsupportedEventError

_EVENTS = get_args(Event)
_NO_CUT = 1e-300
USE_PLD = 'Use accountant="pld".'  # for events and relations that only it knows
UNESTABLISHED = (
    "No bound on the epsilon of DP-FP as published is known: the encoder's gradient is computed "
    'from activations without noise. Use accountant="gdp_clt" for the figure that the paper gives, '
    'or the variant "frozen" for a guarantee.'
)


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


_Term = TypeVar("_Term", SampledTerm, VisibleTerm, PublishedTerm)


class SearchTerm(NamedTuple):
    """The best of randomly many runs.

    ``shape`` is that of the truncated negative binomial, or None for Poisson.
    """

    run: Composition
    mean_runs: float
    shape: float | None


@dataclass(frozen=True)
class Composition:
    """The canonical form of a list of events.

    Attributes:
        sampled: the distinct Poisson-sampled mechanisms, sorted, with their total steps.
        gaussian_mu: sensitivity / standard deviation of the one Gaussian that all unsampled ones
            compose to, sqrt(sum steps / noise_multiplier^2) (Dong, Roth, Su 2019, Corollary 3.3); 0
            if there are none.
        noiseless: an example entered some step without noise, so no finite epsilon holds.
        noise_multipliers, sample_rates, steps: what ran, for range checks; unsampled mechanisms are
            included with rate 1, and a search with those of one run.
        truncated, user_rows, allocated, searches: the other kinds of sampled mechanisms and the
            searches; not every accountant can describe them.
        visible, responses, published: mechanisms that release something about each example by
            itself.
        restricted: name, relations and reason for each kind of event restricted to some relations.
    """

    sampled: tuple[SampledTerm, ...]
    gaussian_mu: float
    noiseless: bool
    noise_multipliers: tuple[float, ...]
    sample_rates: tuple[float, ...]
    steps: int
    truncated: tuple[TruncatedTerm, ...] = ()
    user_rows: tuple[UserRowsTerm, ...] = ()
    allocated: tuple[AllocatedTerm, ...] = ()
    searches: tuple[SearchTerm, ...] = ()
    visible: tuple[VisibleTerm, ...] = ()
    responses: tuple[ResponseTerm, ...] = ()
    published: tuple[PublishedTerm, ...] = ()
    restricted: tuple[tuple[str, tuple[str, ...], str], ...] = ()

    @property
    def empty(self) -> bool:
        """Whether nothing that ran depends on an example, so that epsilon is exactly 0."""
        parts = (
            self.sampled
            or self.truncated
            or self.user_rows
            or self.allocated
            or self.searches
            or self.visible
            or self.responses
            or self.published
        )
        return not parts and self.gaussian_mu == 0 and not self.noiseless

    def refuse(
        self,
        accountant: str,
        relation: str,
        *,
        replace_one: str = "",
        truncated: str = "",
        user_rows: str = "",
        allocated: str = "",
        searches: str = "",
        visible: str = "",
        published: str = "",
    ) -> None:
        """Raise UnsupportedEventError for a relation or kind of event that has a next move here.

        Args:
            replace_one, truncated, user_rows, allocated, searches, visible, published: the next
                move for the user where the accountant does not know that relation or kind; empty
                where it does.
        """
        for name, relations, why in self.restricted:
            if relation not in relations:
                raise UnsupportedEventError(
                    f"Relation {relation!r} does not hold for {name}: {why} Use "
                    f"relation={relations[0]!r}."
                )
        if relation == "replace_one" and replace_one:
            raise UnsupportedEventError(
                f"Accountant {accountant!r} does not know relation 'replace_one'. {replace_one}"
            )
        cut = self.truncated or tuple(
            term for search in self.searches for term in search.run.truncated
        )
        for kind, terms, next_move in (
            ("TruncatedPoissonSampledGaussian", cut, truncated),
            ("UserRowsGaussian", self.user_rows, user_rows),
            ("RandomAllocationGaussian", self.allocated, allocated),
            ("BestOfRandomRuns", self.searches, searches),
            ("events that show who took part", self.visible, visible),
            ("RandomizedResponse", self.responses, visible),
            ("PublishedForwardNoise", self.published, published),
        ):
            if terms and next_move:
                raise UnsupportedEventError(
                    f"Accountant {accountant!r} cannot describe {kind}. {next_move}"
                )


def compose(events: Event | Iterable[Event]) -> Composition:
    """Merge one event or several into their canonical form.

    Raises:
        UnsupportedEventError: something in the list is not an event of
            :mod:`hf_dp.accounting.events`; or no neighboring relation holds for all of them.
    """
    events = (events,) if isinstance(events, Event) else tuple(events)
    for event in events:
        # Exact classes: a subclass could mean another mechanism.
        if type(event) not in _EVENTS:
            known = [cls.__name__ for cls in _EVENTS]
            raise UnsupportedEventError(
                f"Expected events of types {known}, got {event!r} of type {type(event)}."
            )
    ran = [event for event in events if event.steps > 0]
    restricted = _restrictions(events)
    if restricted and not set.intersection(*(set(relations) for _, relations, _ in restricted)):
        shown = "; ".join(f"{name}: {', '.join(relations)}" for name, relations, _ in restricted)
        raise UnsupportedEventError(
            f"These events hold under no common neighboring relation ({shown})."
        )
    parts = _Parts()
    for event in ran:
        parts.add(event)
    return dataclasses.replace(parts.composition(), restricted=restricted)


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


class _Parts:
    """Steps of equal mechanisms, added up."""

    def __init__(self) -> None:
        self.poisson: Counter[tuple[float, float]] = Counter()  # unsampled Gaussians at rate 1
        self.truncated: Counter[tuple[float, float, int, int]] = Counter()
        self.user_rows: Counter[tuple[float, float, int]] = Counter()
        self.allocated: Counter[tuple[float, int]] = Counter()  # allocations, not steps
        self.visible: Counter[tuple[float, float]] = Counter()
        self.responses: Counter[tuple[float, int]] = Counter()
        self.published: Counter[tuple[float, float]] = Counter()
        self.searches: list[SearchTerm] = []

    def add(self, event: Event) -> None:
        """Add an event that ran at least once."""
        if isinstance(event, SumAndLoss):
            event = event.joint
        if isinstance(event, BestOfRandomRuns):
            run = compose(event.run)
            if not run.empty:
                self.searches.append(SearchTerm(run, event.mean_runs, event.shape))
        elif isinstance(event, RandomizedResponse):
            self.responses[event.epsilon, event.num_classes] += event.steps
        elif isinstance(event, Gaussian | RecordRelease):
            self.poisson[event.noise_multiplier, 1.0] += event.steps
        elif isinstance(event, RandomAllocationGaussian):
            kind_of = (event.noise_multiplier, event.steps_per_allocation)
            self.allocated[kind_of] += event.steps // event.steps_per_allocation
        elif event.sample_rate == 0:
            pass
        elif isinstance(event, TruncatedPoissonSampledGaussian) and _cuts(event):
            cut = (
                event.noise_multiplier,
                event.sample_rate,
                event.num_examples,
                event.max_batch_size,
            )
            self.truncated[cut] += event.steps
        elif isinstance(event, UserRowsGaussian) and event.sample_rate == 1:
            self.poisson[event.noise_multiplier / event.max_rows, 1.0] += event.steps
        elif isinstance(event, UserRowsGaussian) and event.max_rows > 1:
            rows = (event.noise_multiplier, event.sample_rate, event.max_rows)
            self.user_rows[rows] += event.steps
        elif isinstance(
            event, PoissonSampledGaussian | TruncatedPoissonSampledGaussian | UserRowsGaussian
        ):
            self.poisson[event.noise_multiplier, event.sample_rate] += event.steps
        elif isinstance(event, SumAndRows) and event.one_draw:
            self.visible[event.joint_noise_multiplier, event.sample_rate] += event.steps
        elif isinstance(event, SumAndRows):
            self.poisson[event.noise_multiplier, event.sample_rate] += event.steps
            self.visible[event.record_noise_multiplier, event.sample_rate] += event.steps
        else:
            kind = self.published if isinstance(event, PublishedForwardNoise) else self.visible
            kind[event.noise_multiplier, event.sample_rate] += event.steps * event.num_micro_batches

    def composition(self) -> Composition:
        """Return the canonical form of all events added."""
        drawn = (self.poisson, self.truncated, self.user_rows, self.visible, self.published)
        noisy = _terms(SampledTerm, self.poisson)
        truncated = tuple(
            sorted(
                TruncatedTerm(key[0], key[1], steps, *key[2:])
                for key, steps in self.truncated.items()
                if key[0] > 0
            )
        )
        user_rows = tuple(
            sorted(
                UserRowsTerm(key[0], key[1], steps, key[2])
                for key, steps in self.user_rows.items()
                if key[0] > 0
            )
        )
        allocated = tuple(
            sorted(AllocatedTerm(*key, count) for key, count in self.allocated.items() if key[0])
        )
        visible, published = (
            _terms(VisibleTerm, self.visible),
            _terms(PublishedTerm, self.published),
        )
        plain: list[tuple[float, float, int]] = [
            *noisy,
            *(term[:3] for term in truncated),
            *(term[:3] for term in user_rows),
            *((t.noise_multiplier, 1 / t.steps_per_allocation, t.steps) for t in allocated),
            *visible,
            *published,
        ]
        runs = [term.run for term in self.searches]
        return Composition(
            sampled=tuple(term for term in noisy if term.sample_rate < 1),
            gaussian_mu=math.sqrt(
                math.fsum(steps / sigma**2 for sigma, rate, steps in noisy if rate == 1)
            ),
            noiseless=any(key[0] == 0 for counts in (*drawn, self.allocated) for key in counts)
            or any(run.noiseless for run in runs),
            noise_multipliers=_with_runs(
                [sigma for sigma, _, _ in plain], [run.noise_multipliers for run in runs]
            ),
            sample_rates=_with_runs(
                [rate for _, rate, _ in plain], [run.sample_rates for run in runs]
            ),
            steps=sum(sum(counts.values()) for counts in (*drawn, self.responses))
            + sum(term.steps for term in allocated)
            + sum(term.run.steps for term in self.searches),
            truncated=truncated,
            user_rows=user_rows,
            allocated=allocated,
            searches=tuple(self.searches),
            visible=visible,
            responses=tuple(
                sorted(ResponseTerm(*key, steps) for key, steps in self.responses.items())
            ),
            published=published,
        )


def _terms(
    kind: Callable[[float, float, int], _Term], counts: Mapping[tuple[float, float], int]
) -> tuple[_Term, ...]:
    """Return the mechanisms with noise, sorted."""
    return tuple(
        sorted(kind(sigma, rate, steps) for (sigma, rate), steps in counts.items() if sigma > 0)
    )


def _with_runs(own: list[float], of_runs: list[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(own) + tuple(value for values in of_runs for value in values)
