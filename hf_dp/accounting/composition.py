"""What a list of events composes to, in the form that all accountants share.

The order of events does not matter to any accountant here (every one bounds adaptive composition), so equal mechanisms
are merged, what touches no record is dropped, and plain Gaussians become a single one, which is exact.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, get_args

from scipy.special import bdtrc

from hf_dp.accounting.events import (
    BestOfRandomRuns,
    Event,
    Gaussian,
    TruncatedPoissonSampledGaussian,
)
from hf_dp.errors import UnsupportedEventError

_EVENTS = get_args(Event)
_NO_CUT = 1e-300
USE_PLD = 'Use accountant="pld".'  # where only it knows an event or a relation


class SampledTerm(NamedTuple):
    """A Poisson-sampled Gaussian with 0 < sample_rate < 1, noise_multiplier > 0 and steps > 0."""

    noise_multiplier: float
    sample_rate: float
    steps: int


class TruncatedTerm(NamedTuple):
    """A truncated one, with 0 < sample_rate <= 1, noise_multiplier > 0, steps > 0 and a cut that can happen."""

    noise_multiplier: float
    sample_rate: float
    steps: int
    num_examples: int
    max_batch_size: int


class SearchTerm(NamedTuple):
    """The best of randomly many runs; ``shape`` is that of the truncated negative binomial, None for Poisson."""

    run: Composition
    mean_runs: float
    shape: float | None
    times: int


@dataclass(frozen=True)
class Composition:
    """The canonical form of a list of events.

    Attributes:
        sampled: the distinct Poisson-sampled mechanisms, sorted, with their total steps.
        truncated, searches: the same of the other kinds, as they came; not every accountant can describe them.
        gaussian_mu: sensitivity / standard deviation of the one Gaussian that all unsampled ones compose to,
            sqrt(sum steps / noise_multiplier^2) (Dong, Roth, Su 2019, Corollary 3.3); 0 if there are none.
        noiseless: a record entered some step without noise, so no finite epsilon holds.
        noise_multipliers, sample_rates, steps: what ran, for range checks (unsampled ones included, rate 1; of a search
            those of one run).
        capped: some draws have a largest size, whether or not it can cut anything among these records.
    """

    sampled: tuple[SampledTerm, ...]
    gaussian_mu: float
    noiseless: bool
    noise_multipliers: tuple[float, ...]
    sample_rates: tuple[float, ...]
    steps: int
    truncated: tuple[TruncatedTerm, ...] = ()
    searches: tuple[SearchTerm, ...] = ()
    capped: bool = False

    @property
    def empty(self) -> bool:
        """Nothing that depends on a record ran: epsilon is exactly 0."""
        parts = self.sampled or self.truncated or self.searches
        return not parts and self.gaussian_mu == 0 and not self.noiseless

    def refuse(
        self, accountant: str, relation: str, *, replace_one: str = "", truncated: str = "", searches: str = ""
    ) -> None:
        """Raises UnsupportedEventError for that relation, or a kind of event, where a next move is given for it."""
        if relation == "replace_one" and replace_one:
            raise UnsupportedEventError(
                f"Accountant {accountant!r} does not know relation 'replace_one'. {replace_one}"
            )
        if relation == "add_remove" and self.capped:
            raise UnsupportedEventError(
                "No accountant knows relation 'add_remove' for draws with a largest size: with one record more, which a "
                "neighbor has, other records would be cut. Use relation='zero_out'."
            )
        cut = self.truncated or tuple(term for search in self.searches for term in search.run.truncated)
        for kind, terms, next_move in (
            (TruncatedPoissonSampledGaussian, cut, truncated),
            (BestOfRandomRuns, self.searches, searches),
        ):
            if terms and next_move:
                raise UnsupportedEventError(f"Accountant {accountant!r} cannot describe {kind.__name__}. {next_move}")


def compose(events: Event | Iterable[Event]) -> Composition:
    """Merges one event or several into their canonical form.

    Raises:
        UnsupportedEventError: something in the list is not an event of :mod:`hf_dp.accounting.events`.
    """
    events = (events,) if isinstance(events, Event) else tuple(events)
    merged: dict[tuple[float, float], int] = {}
    truncated: dict[tuple[float, float, int, int], int] = {}
    searches: list[SearchTerm] = []
    for event in events:
        # Exact classes: a subclass could mean another mechanism.
        if type(event) not in _EVENTS:
            known = [cls.__name__ for cls in _EVENTS]
            raise UnsupportedEventError(f"Expected events of types {known}, got {event!r} of type {type(event)}.")
        if event.steps == 0:
            continue
        if isinstance(event, BestOfRandomRuns):
            run = compose(event.run)
            if not run.empty:
                searches.append(SearchTerm(run, event.mean_runs, event.shape, event.steps))
        elif isinstance(event, TruncatedPoissonSampledGaussian) and _cuts(event):
            cut = (event.noise_multiplier, event.sample_rate, event.num_examples, event.max_batch_size)
            if event.sample_rate > 0:
                truncated[cut] = truncated.get(cut, 0) + event.steps
        else:
            rate = 1.0 if isinstance(event, Gaussian) else event.sample_rate
            if rate > 0:
                merged[event.noise_multiplier, rate] = merged.get((event.noise_multiplier, rate), 0) + event.steps
    capped = any(_is_capped(event) for event in events)
    return dataclasses.replace(_composition(merged, truncated, tuple(searches)), capped=capped)


def _is_capped(event: Event) -> bool:
    if isinstance(event, BestOfRandomRuns):
        return any(_is_capped(each) for each in event.run)
    return isinstance(event, TruncatedPoissonSampledGaussian)


def _cuts(event: TruncatedPoissonSampledGaussian) -> bool:
    """Whether a draw can be cut, other than with a probability that no epsilon shows.

    With probability t of a cut in one step, T steps are within total variation T t of T plain ones, so what is (e, d)-private
    without a cut is (e, d + (1 + exp(e)) T t)-private with it: at t = 1e-300, T = 1e9 and e = 500, d + 1e-74. (Below that,
    tails underflow and dp-accounting divides by them.)
    """
    if event.max_batch_size >= event.num_examples:
        return False
    return bool(bdtrc(event.max_batch_size - 1, event.num_examples, event.sample_rate) > _NO_CUT)  # P(K >= max)


def _composition(
    merged: dict[tuple[float, float], int],
    truncated: dict[tuple[float, float, int, int], int],
    searches: tuple[SearchTerm, ...],
) -> Composition:
    noisy = sorted((sigma, rate, steps) for (sigma, rate), steps in merged.items() if sigma > 0)
    cut = sorted(TruncatedTerm(key[0], key[1], steps, *key[2:]) for key, steps in truncated.items() if key[0] > 0)
    plain: list[tuple[float, float, int]] = [*noisy, *(term[:3] for term in cut)]
    return Composition(
        sampled=tuple(SampledTerm(*term) for term in noisy if term[1] < 1),
        gaussian_mu=math.sqrt(math.fsum(steps / sigma**2 for sigma, rate, steps in noisy if rate == 1)),
        noiseless=any(key[0] == 0 for key in (*merged, *truncated)) or any(term.run.noiseless for term in searches),
        noise_multipliers=_with_runs([sigma for sigma, _, _ in plain], [t.run.noise_multipliers for t in searches]),
        sample_rates=_with_runs([rate for _, rate, _ in plain], [t.run.sample_rates for t in searches]),
        steps=sum(merged.values()) + sum(truncated.values()) + sum(t.times * t.run.steps for t in searches),
        truncated=tuple(cut),
        searches=searches,
    )


def _with_runs(own: list[float], of_runs: list[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(own) + tuple(value for values in of_runs for value in values)
