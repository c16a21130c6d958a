"""Samplers: who is drawn, by the operating system's random bytes, and what the accountant hears."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from hf_dp import _validate
from hf_dp.accounting import (
    Event,
    PoissonSampledGaussian,
    RandomAllocationGaussian,
    SampledRecordRelease,
    TruncatedPoissonSampledGaussian,
    UserRowsGaussian,
)
from hf_dp.plans.trials import RandomBytes, successes


class Draws(Protocol):
    """Draws, one after the other: of a sampler, or of what stands between it and the model."""

    def __iter__(self) -> Iterator[list[int]]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Sampler(ABC):
    """Yields logical batches: lists of indices of examples, in increasing order, possibly empty.

    It makes its own event, so that the accountant is told exactly what was drawn.

    Args:
        random_bytes: the source of randomness, ``n -> n bytes``: the operating system's. Another is
            for tests only: a predictable sampler voids the amplification that is counted on.
    """

    num_examples: int
    random_bytes: RandomBytes = field(default=os.urandom, repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        _validate.integer("num_examples", self.num_examples, 1)

    @abstractmethod
    def event(self, noise_multiplier: float, steps: int = 1) -> Event:
        """Return the event of ``steps`` draws, each released with this noise multiplier."""

    @abstractmethod
    def __iter__(self) -> Iterator[list[int]]: ...

    @abstractmethod
    def __len__(self) -> int: ...


@dataclass(frozen=True)
class BernoulliSampler(Sampler):
    """Draws each example independently of all others with probability ``sample_rate``, in each of
    ``steps`` independent draws."""

    sample_rate: float
    steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.in_unit_interval("sample_rate", self.sample_rate, one=True)
        _validate.integer("steps", self.steps, 1)

    @abstractmethod
    def draw(self) -> list[int]:
        """Draw the indices of one logical batch."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.steps):
            yield self.draw()

    def __len__(self) -> int:
        return self.steps


@dataclass(frozen=True)
class PoissonSampler(BernoulliSampler):
    """Draws each example independently with probability ``sample_rate``.

    Its probability is exactly ``round(q * 2**64) / 2**64`` (:mod:`hf_dp.plans.trials`), within
    2**-65 of q, which the accountant is told: a relative error of 2**-65 / q, below 3e-11 at
    q = 1e-9, and none from q = 2**-12 on. A draw costs as much as it has examples.

    Args:
        max_batch_size: the largest number of examples in a draw; a larger draw is reduced to a
            uniformly random part. None means no limit.
        rows_of_a_user: the most of the N examples that are one user's rows, >= 1; the accountant
            then answers for users.
    """

    max_batch_size: int | None = None
    rows_of_a_user: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.integer("rows_of_a_user", self.rows_of_a_user, 1)
        if self.max_batch_size is not None:
            _validate.integer("max_batch_size", self.max_batch_size, 1)

    def draw(self) -> list[int]:
        """Draw the indices of one logical batch, in increasing order."""
        return self.cut(self.joining(self.num_examples)).tolist()

    def joining(self, trials: int) -> np.ndarray:
        """Draw which of so many join."""
        return successes(trials, self.sample_rate, self.random_bytes)

    def cut(self, drawn: np.ndarray) -> np.ndarray:
        """Return a uniformly random part of a draw that is too large, in increasing order."""
        if self.max_batch_size is not None and len(drawn) > self.max_batch_size:
            # The order of independent random keys is uniformly random. Two 64-bit keys are equal
            # with probability 2^-64 per pair; then the earlier index comes first.
            keys = np.frombuffer(self.random_bytes(8 * len(drawn)), dtype=np.uint64)
            drawn = np.sort(drawn[np.argsort(keys, kind="stable")[: self.max_batch_size]])
        return drawn

    def event(self, noise_multiplier: float, steps: int = 1) -> Event:
        drawn = noise_multiplier, self.sample_rate, steps
        if self.rows_of_a_user > 1:
            return UserRowsGaussian(*drawn, self.rows_of_a_user)
        if self.max_batch_size is not None:
            return TruncatedPoissonSampledGaussian(*drawn, self.num_examples, self.max_batch_size)
        return PoissonSampledGaussian(*drawn)


@dataclass(frozen=True)
class AllocationSampler(Sampler):
    """Allocates each example to one of ``steps`` >= 2 logical batches, uniformly and independently
    of all others. One iteration is one allocation, a second one another."""

    steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.integer("steps", self.steps, 2)

    def allocate(self) -> np.ndarray:
        """Draw the step, from 0 to ``steps`` - 1, of each example."""
        return uniform_below(self.steps, self.num_examples, self.random_bytes)

    def event(self, noise_multiplier: float, steps: int = 1) -> Event:
        """Return the event of ``steps`` logical batches, the last allocation counted in full."""
        allocations = -(-steps // self.steps)
        return RandomAllocationGaussian(noise_multiplier, self.steps, allocations * self.steps)

    def __iter__(self) -> Iterator[list[int]]:
        steps = self.allocate()
        order = np.argsort(steps, kind="stable")  # within a step, examples stay in order
        ends = np.searchsorted(steps[order], np.arange(self.steps + 1))
        for first, last in zip(ends[:-1], ends[1:], strict=True):
            yield order[first:last].tolist()

    def __len__(self) -> int:
        return self.steps


def uniform_below(limit: int, count: int, random_bytes: RandomBytes) -> np.ndarray:
    """Draw ``count`` whole numbers below ``limit``, each exactly equally likely: of 64 random bits,
    those above the largest multiple of ``limit`` are drawn again."""
    most = 2**64 - 2**64 % limit
    drawn = np.frombuffer(random_bytes(8 * count), dtype=np.uint64).copy()
    while (again := drawn > np.uint64(most - 1)).any():
        drawn[again] = np.frombuffer(random_bytes(8 * int(again.sum())), dtype=np.uint64)
    return (drawn % np.uint64(limit)).astype(np.int64)


@dataclass(frozen=True)
class MicroBatchSampler(BernoulliSampler):
    """Joins ``num_micro_batches`` independent Poisson draws per step (Du and Mi 2021, section 3.2).

    An example may occur more than once in a step. The M N Bernoulli trials of a step are drawn
    together, each as a :class:`PoissonSampler` draws.

    Args:
        sample_rate: p, of each draw.
        num_micro_batches: M >= 1.
    """

    num_micro_batches: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.integer("num_micro_batches", self.num_micro_batches, 1)

    def event(self, noise_multiplier: float, steps: int = 1) -> Event:
        """Return the event of a vector of each row that is drawn, each time that it is drawn."""
        return SampledRecordRelease(
            noise_multiplier, self.sample_rate, steps, self.num_micro_batches
        )

    def micro_batches(self) -> list[list[int]]:
        """Draw M lists of indices, each in increasing order and possibly empty."""
        trials = self.num_examples * self.num_micro_batches
        drawn = successes(trials, self.sample_rate, self.random_bytes)
        which, places = np.divmod(drawn, self.num_examples)
        ends = np.searchsorted(which, np.arange(self.num_micro_batches + 1))
        return [places[a:b].tolist() for a, b in zip(ends[:-1], ends[1:], strict=True)]

    def draw(self) -> list[int]:
        """Draw the indices of one step's micro-batches, one after the other."""
        return [index for drawn in self.micro_batches() for index in drawn]
