"""Random allocation: each example once in an iteration, in a uniformly random step, independently
of all others and of earlier iterations."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from hf_dp.accounting import RandomAllocationGaussian
from hf_dp.errors import InvalidArgumentError
from hf_dp.plans.draws import AllocationSampler, Share
from hf_dp.plans.draws.allocation import _below

REJECT = 1e-6
N, STEPS, TIMES = 200, 7, 300


def allocations(draw: Callable[[], list[list[int]]]) -> np.ndarray:
    """(times, N): the step of each example."""
    found = np.full((TIMES, N), -1)
    for row in found:
        for step, batch in enumerate(draw()):
            assert batch == sorted(batch)
            assert (row[batch] == -1).all()  # no example twice
            row[batch] = step
    assert (found >= 0).all()  # none left out
    return found


def uniform(counts: np.ndarray) -> float:
    return float(stats.chisquare(counts.ravel()).pvalue)


def p_values(draw: Callable[[], list[list[int]]]) -> dict[str, float]:
    steps = allocations(draw)
    pairs = np.zeros((3, STEPS, STEPS))
    np.add.at(pairs[0], (steps[:, :-1:2], steps[:, 1::2]), 1)
    np.add.at(pairs[1], (steps[:-1:2], steps[1::2]), 1)
    np.add.at(pairs[2], (steps[:, : N // 2], steps[:, N // 2 :]), 1)
    sizes = np.stack([(steps == step).sum(1) for step in range(STEPS)])
    spread = float((((sizes - N / STEPS) ** 2) / (N / STEPS)).sum())
    below = stats.chi2.cdf(spread, (STEPS - 1) * TIMES)
    return {
        "steps are equally likely": uniform(np.bincount(steps.ravel(), minlength=STEPS)),
        "for each example": float(
            stats.kstest(
                [uniform(np.bincount(each, minlength=STEPS)) for each in steps.T], "uniform"
            ).pvalue
        ),
        "neighbors are independent": uniform(pairs[0]),
        "iterations are independent": uniform(pairs[1]),
        "the two halves are independent": uniform(pairs[2]),
        "sizes vary as those of independent examples": 2 * min(below, 1 - below),
    }


def test_allocations_are_uniform_and_independent():
    sampler = AllocationSampler(N, STEPS)
    for what, p in p_values(lambda: list(sampler)).items():
        assert p > REJECT, what


def shuffled() -> list[list[int]]:
    """Batches of one size: what loaders do, and what the accountant does not describe."""
    order = np.random.default_rng().permutation(N)
    return [sorted(part.tolist()) for part in np.array_split(order, STEPS)]


@pytest.mark.parametrize(
    ("planted", "seen"),
    [
        (shuffled, "sizes vary as those of independent examples"),
        (
            lambda: list(AllocationSampler(N, STEPS, random_bytes=np.random.default_rng(1).bytes)),
            "iterations",
        ),
        (lambda: [list(range(step, N, STEPS)) for step in range(STEPS)], "neighbors"),
    ],
)
def test_a_wrong_sampler_is_caught(planted, seen):
    found = p_values(planted)
    assert min(p for what, p in found.items() if what.startswith(seen)) < REJECT


def test_shares_together_are_one_allocation():
    begun = []
    samplers = [
        AllocationSampler(50, 4, share=Share(rank, 3), begin=lambda: begun.append(1))
        for rank in range(3)
    ]
    batches = [list(sampler) for sampler in samplers]
    assert all(len(each) == 4 for each in batches)
    assert sorted(index for each in batches for batch in each for index in batch) == list(range(50))
    assert len(begun) == 3


def test_an_allocation_begins_before_it_is_drawn():
    order = []

    def source(count: int) -> bytes:
        order.append("drawn")
        return os.urandom(count)

    list(AllocationSampler(5, 2, random_bytes=source, begin=lambda: order.append("begun")))
    assert order == ["begun", "drawn"]


def test_bits_beyond_the_last_multiple_are_drawn_again():
    """2^64 = 1 mod 3: of 2^64 numbers the last one would make 0 more likely."""
    given = iter([b"\xff" * 8 + (5).to_bytes(8, "little"), (7).to_bytes(8, "little")])
    assert _below(3, 2, lambda count: next(given)).tolist() == [1, 2]


def test_the_event_counts_allocations_in_full():
    sampler = AllocationSampler(50, 4)
    assert sampler.event(1.0, 1) == RandomAllocationGaussian(1.0, 4, 4)
    assert sampler.event(1.0, 9) == RandomAllocationGaussian(1.0, 4, 12)
    with pytest.raises(InvalidArgumentError, match="`steps`"):
        AllocationSampler(50, 1)
