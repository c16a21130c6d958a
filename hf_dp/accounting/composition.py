"""What a list of events composes to, in the form that all accountants share.

The order of events does not matter to any accountant here (every one bounds adaptive composition), so equal mechanisms
are merged, what touches no record is dropped, and plain Gaussians become a single one, which is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hf_dp.accounting.events import Event, Gaussian, PoissonSampledGaussian
from hf_dp.errors import UnsupportedEventError


class SampledTerm(NamedTuple):
    """A Poisson-sampled Gaussian with 0 < sample_rate < 1, noise_multiplier > 0 and steps > 0."""

    noise_multiplier: float
    sample_rate: float
    steps: int


@dataclass(frozen=True)
class Composition:
    """The canonical form of a list of events.

    Attributes:
        sampled: the distinct Poisson-sampled mechanisms, sorted, with their total steps.
        gaussian_mu: sensitivity / standard deviation of the one Gaussian that all unsampled ones compose to,
            sqrt(sum steps / noise_multiplier^2) (Dong, Roth, Su 2019, Corollary 3.3); 0 if there are none.
        noiseless: a record entered some step without noise, so no finite epsilon holds.
        noise_multipliers, sample_rates, steps: what ran, for range checks (unsampled ones included; rate 1).
    """

    sampled: tuple[SampledTerm, ...]
    gaussian_mu: float
    noiseless: bool
    noise_multipliers: tuple[float, ...]
    sample_rates: tuple[float, ...]
    steps: int

    @property
    def empty(self) -> bool:
        """Nothing that depends on a record ran: epsilon is exactly 0."""
        return not self.sampled and self.gaussian_mu == 0 and not self.noiseless


def compose(events: Event | Iterable[Event]) -> Composition:
    """Merges one event or several into their canonical form.

    Raises:
        UnsupportedEventError: something in the list is not an event of :mod:`hf_dp.accounting.events`.
    """
    if isinstance(events, (Gaussian, PoissonSampledGaussian)):
        events = (events,)
    merged: dict[tuple[float, float], int] = {}
    for event in events:
        # Exact classes: a subclass could mean another mechanism.
        if type(event) is Gaussian:
            key = (event.noise_multiplier, 1.0)
        elif type(event) is PoissonSampledGaussian:
            key = (event.noise_multiplier, event.sample_rate)
        else:
            raise UnsupportedEventError(
                f"Expected events of type Gaussian or PoissonSampledGaussian, got {event!r} of type {type(event)}."
            )
        if event.steps > 0 and key[1] > 0:
            merged[key] = merged.get(key, 0) + event.steps
    noisy = sorted((sigma, rate, steps) for (sigma, rate), steps in merged.items() if sigma > 0)
    return Composition(
        sampled=tuple(SampledTerm(*term) for term in noisy if term[1] < 1),
        gaussian_mu=math.sqrt(math.fsum(steps / sigma**2 for sigma, rate, steps in noisy if rate == 1)),
        noiseless=any(sigma == 0 for sigma, _ in merged),
        noise_multipliers=tuple(sigma for sigma, _, _ in noisy),
        sample_rates=tuple(rate for _, rate, _ in noisy),
        steps=sum(merged.values()),
    )
