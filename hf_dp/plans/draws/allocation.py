"""Random allocation: each example takes part once an epoch, in a uniformly random step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hf_dp import _validate
from hf_dp.accounting import RandomAllocationGaussian
from hf_dp.accounting.knows import ALLOCATION
from hf_dp.plans.draws.base import AccountedSampler, Draw, DrawWords, RandomBytes, register_draw
from hf_dp.plans.schedule import Schedule


@dataclass(frozen=True)
class AllocationSampler(AccountedSampler):
    """Allocates each example to one of ``steps`` logical batches, uniformly and independently of
    all others.

    One iteration is one allocation: it yields its ``steps`` lists of indices, each in increasing
    order and possibly empty. A second iteration allocates anew.

    Args:
        num_examples: N >= 1.
        steps: t >= 2.
    """

    num_examples: int
    steps: int

    def __post_init__(self) -> None:
        _validate.integer("num_examples", self.num_examples, 1)
        _validate.integer("steps", self.steps, 2)

    def allocate(self) -> np.ndarray:
        """Draw the step, from 0 to ``steps`` - 1, of each example of the share."""
        return _below(self.steps, len(self.share.of(self.num_examples)), self.random_bytes)

    def event(self, noise_multiplier: float, steps: int = 1) -> RandomAllocationGaussian:
        """Return the event of ``steps`` logical batches, the last allocation counted in full."""
        allocations = -(-steps // self.steps)
        return RandomAllocationGaussian(noise_multiplier, self.steps, allocations * self.steps)

    def __iter__(self) -> Iterator[list[int]]:
        self.begin()
        examples, steps = self.share.of(self.num_examples), self.allocate()
        order = np.argsort(steps, kind="stable")  # within a step, examples stay in order
        ends = np.searchsorted(steps[order], np.arange(self.steps + 1))
        for first, last in zip(ends[:-1], ends[1:], strict=True):
            yield examples[order[first:last]].tolist()

    def __len__(self) -> int:
        return self.steps


def _below(limit: int, count: int, random_bytes: RandomBytes) -> np.ndarray:
    """Draw ``count`` whole numbers below ``limit``, each exactly equally likely.

    Of 64 random bits, those above the largest multiple of ``limit`` are drawn again.
    """
    most = 2**64 - 2**64 % limit
    drawn = np.frombuffer(random_bytes(8 * count), dtype=np.uint64).copy()
    while (again := drawn > np.uint64(most - 1)).any():
        drawn[again] = np.frombuffer(random_bytes(8 * int(again.sum())), dtype=np.uint64)
    return (drawn % np.uint64(limit)).astype(np.int64)


@register_draw
@dataclass(frozen=True)
class RandomAllocation(Draw):
    """An epoch has t = N / B steps, rounded, and each example takes part in one of them.

    The expected logical batch is then N / t. (Chua et al. 2025, arXiv 2412.16802; Feldman and
    Shenfeld 2025, arXiv 2502.08202.)
    """

    name: ClassVar[str] = "random_allocation"
    sampling: ClassVar[str] = "random_allocation"
    kind: ClassVar[str] = ALLOCATION

    def sampler(self, schedule: Schedule, steps: int) -> AllocationSampler:
        """Return the sampler of one allocation, however many steps are asked for: each iteration
        of it is one that the ledger holds."""
        n, batch = schedule.drawn_from, schedule.expected_batch_size
        return AllocationSampler(n, self.steps_per_epoch(n, batch))

    def steps_per_epoch(self, drawn_from: int, expected_batch_size: float) -> int:
        steps = round(drawn_from / expected_batch_size)
        if steps < 2:
            raise _validate.invalid(
                "expected_batch_size",
                expected_batch_size,
                f"to be at most {drawn_from / 2:g}, half of the {drawn_from} examples, with "
                f"sampling={self.sampling!r}",
                "Each example takes part in one of two or more steps of an epoch. Lower it.",
            )
        return steps

    def steps_released_together(self, schedule: Schedule) -> int:
        return self.sampler(schedule, 1).steps

    def words(self, schedule: Schedule) -> DrawWords:
        steps = self.steps_released_together(schedule)
        return DrawWords(
            f"random allocation: each {schedule.one} joins one of the {steps} steps of an "
            "allocation, uniformly and independently of all others; the next allocation is made "
            "anew; one that was begun is accounted in full",
            "random allocation",
        )

    def what_ran(self, schedule: Schedule, steps: int, mechanism: str) -> str:
        of_one = self.steps_released_together(schedule)
        count = steps // of_one
        return (
            f"{count:,} random allocation{'s' * (count > 1)}, each of up to {of_one} steps, of "
            f"{mechanism}"
        )
