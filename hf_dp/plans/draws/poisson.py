"""Poisson sampling: each example joins each step independently of all others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from hf_dp import _validate
from hf_dp.accounting import Event, PoissonSampledGaussian, TruncatedPoissonSampledGaussian
from hf_dp.accounting.knows import POISSON, TRUNCATED, Asked
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.plans.draws.base import AccountedSampler, Draw, DrawWords, register_draw
from hf_dp.plans.schedule import Schedule


@dataclass(frozen=True)
class PoissonSampler(AccountedSampler):
    """Draws each example independently with probability ``sample_rate``.

    A draw compares 64 uniform bits per example with ``round(q * 2**64)``, so the probability is
    exact to 2**-65. Iterating yields ``steps`` draws. Each is a list of indices in increasing
    order, possibly empty.

    Args:
        num_examples: N >= 1.
        sample_rate: q in (0, 1].
        steps: how many draws one iteration over the sampler makes, >= 1.
        max_batch_size: the largest number of examples in a draw; a larger draw is reduced to a
            uniformly random part. None means no limit.

    The draws of all shares together are one Poisson draw from all N examples, because each example
    is drawn independently of all others.
    """

    num_examples: int
    sample_rate: float
    steps: int
    max_batch_size: int | None = None

    def __post_init__(self) -> None:
        _validate.integer("num_examples", self.num_examples, 1)
        _validate.in_unit_interval("sample_rate", self.sample_rate, one=True)
        _validate.integer("steps", self.steps, 1)
        if self.max_batch_size is not None:
            _validate.integer("max_batch_size", self.max_batch_size, 1)
            if self.share.count > 1:
                raise _validate.invalid(
                    "max_batch_size",
                    self.max_batch_size,
                    f"to be None with {self.share.count} processes",
                    "Each draws from examples of its own, so none knows when the whole draw is too "
                    "large. Leave `max_logical_batch_size` unset, or launch one process.",
                    UnsupportedArgumentError,
                )

    def draw(self) -> list[int]:
        """Draw the indices of one logical batch, in increasing order."""
        examples = self.share.of(self.num_examples)
        if self.sample_rate == 1:
            drawn = examples
        else:
            uniform = np.frombuffer(self.random_bytes(8 * len(examples)), dtype=np.uint64)
            drawn = examples[uniform < np.uint64(round(self.sample_rate * 2**64))]
        if self.max_batch_size is not None and len(drawn) > self.max_batch_size:
            # The order of independent random keys is uniformly random. Two 64-bit keys are equal
            # with probability 2^-64 per pair; then the earlier index comes first.
            keys = np.frombuffer(self.random_bytes(8 * len(drawn)), dtype=np.uint64)
            drawn = np.sort(drawn[np.argsort(keys, kind="stable")[: self.max_batch_size]])
        return drawn.tolist()

    def event(self, noise_multiplier: float, steps: int = 1) -> Event:
        if self.max_batch_size is None:
            return PoissonSampledGaussian(noise_multiplier, self.sample_rate, steps)
        return TruncatedPoissonSampledGaussian(
            noise_multiplier, self.sample_rate, steps, self.num_examples, self.max_batch_size
        )

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.steps):
            yield self.draw()

    def __len__(self) -> int:
        return self.steps


@register_draw
@dataclass(frozen=True)
class Poisson(Draw):
    """Each example, or user, joins each step independently with the probability B / N."""

    name: ClassVar[str] = "poisson"
    sampling: ClassVar[str] = "poisson"
    kind: ClassVar[str] = POISSON

    def sampler(self, schedule: Schedule, steps: int) -> PoissonSampler:
        return PoissonSampler(schedule.drawn_from, self.sample_rate(schedule), steps)

    def words(self, schedule: Schedule) -> DrawWords:
        return DrawWords(
            f"Poisson: each {schedule.one} joins each step independently with the probability "
            "sample_rate; an empty draw is a step",
            "Poisson sampling",
        )


@register_draw
@dataclass(frozen=True)
class TruncatedPoisson(Poisson):
    """A Poisson draw of which a step uses a uniformly random part where it is too large.

    Args: max_batch_size: the most examples that a step uses, >= 1.

    Raises: InvalidArgumentError.
    """

    max_batch_size: int

    name: ClassVar[str] = "truncated_poisson"
    kind: ClassVar[str] = TRUNCATED

    def __post_init__(self) -> None:
        _validate.integer("max_logical_batch_size", self.max_batch_size, 1)

    @property
    def asked(self) -> Asked:
        return Asked(self.kind, "max_logical_batch_size", self.max_batch_size)

    def sampler(self, schedule: Schedule, steps: int) -> PoissonSampler:
        return replace(super().sampler(schedule, steps), max_batch_size=self.max_batch_size)

    def most(self, schedule: Schedule) -> int:
        return min(self.max_batch_size, schedule.drawn_from)

    def used(self, schedule: Schedule) -> float:
        """Return E min(K, cap) of a sample of K that is cut: the sum over k <= cap of P(K >= k)."""
        from scipy.special import bdtr  # it takes a fifth of a second

        below = np.arange(self.most(schedule))
        return float((1 - bdtr(below, schedule.drawn_from, self.sample_rate(schedule))).sum())

    @property
    def moved(self) -> int:
        return 2  # another example joins or leaves with the first

    def check(self, schedule: Schedule) -> None:
        if self.max_batch_size < schedule.expected_batch_size:
            raise _validate.invalid(
                "max_logical_batch_size",
                self.max_batch_size,
                f"to be at least expected_batch_size ({schedule.expected_batch_size:g})",
                "Most draws would be cut, which costs privacy; 1.2 times expected_batch_size costs "
                "little at 1024.",
            )

    def words(self, schedule: Schedule) -> DrawWords:
        most = f"{self.max_batch_size} rows"
        if schedule.users is not None:
            most = f"{self.max_batch_size} (each a {schedule.one})"
        return DrawWords(
            f"{super().words(schedule).sampling}; of a draw of more than {most} a uniformly random "
            "part of that size is used",
            "truncated Poisson sampling",
        )
