"""Samplers against the laws that their events describe: Poisson draws, cut ones, M joined ones, and
random allocation.

Statistical tests draw a few hundred thousand bits and reject below p = 1e-9. A right sampler fails
less than one run in a million, also where few are drawn and the chi-square law is a rough one: the
variance of Binomial(40, 0.03) spreads 1.16 times as much as it says, so 6.0 of its standard
deviations are 5.2 of the true ones. The planted samplers fail by tens of orders of magnitude.
"""

import os
import random
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from scipy import stats

from hf_dp.accounting import (
    PoissonSampledGaussian,
    RandomAllocationGaussian,
    SampledRecordRelease,
    TruncatedPoissonSampledGaussian,
    epsilon,
)
from hf_dp.errors import InvalidArgumentError
from hf_dp.plans.samplers import AllocationSampler, MicroBatchSampler, PoissonSampler, uniform_below

REJECT = 1e-9
Draw = Callable[[], list[int]]


def uniform_p(counts: np.ndarray) -> float:
    return float(stats.chisquare(counts.ravel()).pvalue)


def counts_p(values: Iterable[int], law: np.ndarray) -> float:
    """The chi-square test of whole numbers against a law on 0..k; rare ones are put together."""
    observed = np.bincount(list(values), minlength=len(law))
    expected = law * observed.sum()
    common = expected >= 5
    table = [np.append(each[common], each[~common].sum()) for each in (observed, expected)]
    return float(stats.chisquare(*table).pvalue)


def dispersion_p(counts: np.ndarray, trials: int, rate: float) -> float:
    """Two-sided chi-square test of the variance: too even is as wrong as too uneven."""
    statistic = float(np.square(counts - trials * rate).sum() / (trials * rate * (1 - rate)))
    below = stats.chi2.cdf(statistic, len(counts))
    return 2 * min(below, 1 - below)


# -- Poisson draws --


def poisson_p_values(draw: Draw, num_examples: int, rate: float, steps: int) -> dict[str, float]:
    """p-values of what Poisson sampling implies; every one must be unremarkable."""
    joined = np.zeros((steps, num_examples), dtype=bool)
    for step in range(steps):
        joined[step, draw()] = True
    off = joined - rate
    scale = rate * (1 - rate) * np.sqrt(steps * num_examples)
    neighbors = {
        "steps are independent": off[1:] * off[:-1],
        "steps are independent at a distance of two": off[2:] * off[:-2],
        "neighboring rows are independent": off[:, 1:] * off[:, :-1],
    }
    return {
        "batch sizes are Binomial(N, q)": dispersion_p(joined.sum(1), num_examples, rate),
        "inclusions of an example are Binomial(steps, q)": dispersion_p(joined.sum(0), steps, rate),
        "all inclusions together": stats.binomtest(int(joined.sum()), joined.size, rate).pvalue,
        **{
            name: float(2 * stats.norm.sf(abs(products.sum() / scale)))
            for name, products in neighbors.items()
        },
    }


@pytest.mark.parametrize(("num_examples", "rate"), [(400, 0.05), (300, 0.5), (50, 0.9)])
def test_draws_are_poisson(num_examples, rate):
    sampler = PoissonSampler(num_examples, rate, 1)
    p_values = poisson_p_values(sampler.draw, num_examples, rate, steps=800)
    assert min(p_values.values()) > REJECT, p_values


def test_batch_sizes_follow_the_binomial_distribution():
    """Not its mean and variance alone: a chi-square test over the whole distribution."""
    sampler = PoissonSampler(40, 0.1, 1)
    sizes = [len(sampler.draw()) for _ in range(4000)]
    assert counts_p(sizes, stats.binom.pmf(np.arange(41), 40, 0.1)) > REJECT


def shuffling(num_examples: int, size: int) -> Draw:
    order: list[int] = []

    def draw() -> list[int]:
        nonlocal order
        if len(order) < size:
            order = random.sample(range(num_examples), num_examples)
        batch, order = order[:size], order[size:]
        return batch

    return draw


def correlated() -> Draw:
    previous: list[int] = []

    def draw() -> list[int]:
        nonlocal previous
        kept = [i for i in previous if random.random() < 0.5]
        fresh = [i for i in range(400) if i not in previous and random.random() < 0.05 * 0.5 / 0.95]
        previous = kept + fresh
        return previous

    return draw


@pytest.mark.parametrize(
    "planted",
    [
        shuffling(400, 20),
        lambda: random.sample(range(400), 20),
        lambda: [i for i in range(400) if random.random() < 0.04],
        lambda: [i for i in range(400) if random.randrange(64) < 4],
        correlated(),
    ],
    ids=["shuffled epochs", "fixed size", "wrong rate", "rate rounded to 6 bits", "correlated"],
)
def test_planted_samplers_are_seen(planted):
    assert min(poisson_p_values(planted, 400, 0.05, steps=800).values()) < REJECT


def test_a_capped_draw_keeps_a_uniformly_random_part():
    """Each of the examples of a draw that is too large is kept with the same probability, and the
    others as ever. Planted: the part that comes first."""
    sampler = PoissonSampler(40, 0.5, 1, max_batch_size=15)
    draws = [sampler.draw() for _ in range(4000)]
    assert max(map(len, draws)) == 15
    assert all(draw == sorted(set(draw)) for draw in draws)
    law = stats.binom.pmf(np.arange(16), 40, 0.5)
    law[15] = stats.binom.sf(14, 40, 0.5)
    assert counts_p(map(len, draws), law) > REJECT
    full = np.concatenate([draw for draw in draws if len(draw) == 15])
    assert uniform_p(np.bincount(full, minlength=40)) > REJECT
    uncut = (PoissonSampler(40, 0.5, 1).draw() for _ in range(4000))
    first = np.concatenate([draw[:15] for draw in uncut if len(draw) >= 15])
    assert uniform_p(np.bincount(first, minlength=40)) < REJECT


def test_a_cap_that_cannot_bind_changes_nothing_but_is_said():
    capped = TruncatedPoissonSampledGaussian(1.0, 0.5, 3, 10, 10)
    assert PoissonSampler(10, 0.5, 1, max_batch_size=10).event(1.0, 3) == capped
    assert epsilon(capped, 1e-5) == epsilon(PoissonSampledGaussian(1.0, 0.5, 3), 1e-5)


def bits(*values: int) -> Callable[[int], bytes]:
    content = np.array(values, dtype=np.uint64).tobytes()

    def source(count: int) -> bytes:
        assert count == len(content), "one 64-bit number for each example, no more and no less"
        return content

    return source


@pytest.mark.parametrize(
    ("rate", "threshold"), [(0.5, 2**63), (0.25, 2**62), (1 - 2**-53, 2**64 - 2**11)]
)
def test_an_example_joins_exactly_below_the_threshold(rate, threshold):
    source = bits(threshold - 1, threshold, 0, 2**64 - 1)
    assert PoissonSampler(4, rate, 1, random_bytes=source).draw() == [0, 2]


@pytest.mark.parametrize("rate", [0.1, 1 / 3, 1 / 16])  # lower ones: test_trials.py
def test_the_probability_is_exact_to_the_last_bit(rate):
    threshold = round(rate * 2**64)
    assert abs(threshold / 2**64 - rate) <= 2**-65
    source = bits(threshold - 1, threshold)
    assert PoissonSampler(2, rate, 1, random_bytes=source).draw() == [0]


def test_all_and_nobody_are_draws_and_indices_increase():
    assert list(PoissonSampler(5, 1.0, 3)) == [[0, 1, 2, 3, 4]] * 3
    assert list(PoissonSampler(3, 2.0**-64, 4)) == [[]] * 4
    assert len(PoissonSampler(3, 0.5, 4)) == 4
    draw = PoissonSampler(1000, 0.5, 1).draw()
    assert draw == sorted(set(draw)) and all(isinstance(i, int) and 0 <= i < 1000 for i in draw)


# -- where the randomness comes from --


def seed_everything() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def test_seeds_neither_repeat_a_draw_nor_are_moved_by_one():
    draws, found = [], []
    for sampler in (PoissonSampler(500, 0.5, 1), PoissonSampler(500, 0.5, 1), None):
        seed_everything()
        if sampler is not None:
            draws.append(sampler.draw())
        found.append((torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()))
    assert draws[0] != draws[1]  # equal with probability 2**-500
    assert found[0] == found[1] == found[2]


def test_the_source_is_the_operating_system_and_is_not_shown():
    sampler = PoissonSampler(1, 0.5, 1)
    assert sampler.random_bytes is os.urandom and "random_bytes" not in repr(sampler)


# -- M joined draws --


@pytest.mark.parametrize(("rate", "micro"), [(0.03, 5), (0.4, 2), (0.9, 3)])
def test_micro_batches_are_independent_poisson_draws(rate, micro):
    sampler = MicroBatchSampler(40, rate, 1, micro)
    waiting: list[list[int]] = []

    def draw() -> list[int]:
        if not waiting:
            waiting.extend(sampler.micro_batches())
        return waiting.pop()

    assert min(poisson_p_values(draw, 40, rate, 6000).values()) > REJECT
    # At a rate of 0.03 these are 13 standard deviations, and 6 reject.
    planted = poisson_p_values(draw, 40, rate * 1.1, 15_000)
    assert min(planted.values()) < REJECT


def test_a_joined_draw_holds_an_example_as_often_as_it_was_drawn():
    sampler = MicroBatchSampler(30, 0.2, 4, 8)
    draws = [draw for _ in range(500) for draw in sampler]
    counts = np.concatenate([np.bincount(draw, minlength=30) for draw in draws])
    assert counts_p(counts, stats.binom.pmf(np.arange(9), 8, 0.2)) > REJECT
    assert len(sampler) == 4
    assert MicroBatchSampler(3, 1.0, 1, 2).micro_batches() == [[0, 1, 2], [0, 1, 2]]


def test_a_small_rate_costs_as_many_random_numbers_as_examples_drawn():
    asked: list[int] = []

    def counted(count: int) -> bytes:
        asked.append(count)
        return os.urandom(count)

    sampler = MicroBatchSampler(67_349, 32 / (32 * 67_349), 1, 32, random_bytes=counted)
    sizes = [len(sampler.draw()) for _ in range(300)]
    assert sum(asked) / 300 < 8 * 200
    assert counts_p(sizes, stats.poisson.pmf(np.arange(200), 32)) > REJECT


# -- random allocation: each example once in an iteration --

N, STEPS, TIMES = 200, 7, 300


def allocation_p_values(draw: Callable[[], list[list[int]]]) -> dict[str, float]:
    steps = np.full((TIMES, N), -1)  # of each example, in each iteration
    for row in steps:
        for step, batch in enumerate(draw()):
            assert batch == sorted(batch)
            assert (row[batch] == -1).all()  # no example twice
            row[batch] = step
    assert (steps >= 0).all()  # none left out
    pairs = np.zeros((3, STEPS, STEPS))
    np.add.at(pairs[0], (steps[:, :-1:2], steps[:, 1::2]), 1)
    np.add.at(pairs[1], (steps[:-1:2], steps[1::2]), 1)
    np.add.at(pairs[2], (steps[:, : N // 2], steps[:, N // 2 :]), 1)
    sizes = np.stack([(steps == step).sum(1) for step in range(STEPS)])
    spread = float((((sizes - N / STEPS) ** 2) / (N / STEPS)).sum())
    below = stats.chi2.cdf(spread, (STEPS - 1) * TIMES)
    of_each = [uniform_p(np.bincount(each, minlength=STEPS)) for each in steps.T]
    return {
        "steps are equally likely": uniform_p(np.bincount(steps.ravel(), minlength=STEPS)),
        "for each example": float(stats.kstest(of_each, "uniform").pvalue),
        "neighbors are independent": uniform_p(pairs[0]),
        "iterations are independent": uniform_p(pairs[1]),
        "the two halves are independent": uniform_p(pairs[2]),
        "sizes vary as those of independent examples": 2 * min(below, 1 - below),
    }


def test_allocations_are_uniform_and_independent():
    sampler = AllocationSampler(N, STEPS)
    p_values = allocation_p_values(lambda: list(sampler))
    assert min(p_values.values()) > REJECT, p_values


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
def test_a_wrong_allocation_is_caught(planted, seen):
    found = allocation_p_values(planted)
    assert min(p for what, p in found.items() if what.startswith(seen)) < REJECT


def test_bits_beyond_the_last_multiple_are_drawn_again():
    """2^64 = 1 mod 3: of 2^64 numbers the last one would make 0 more likely."""
    given = iter([b"\xff" * 8 + (5).to_bytes(8, "little"), (7).to_bytes(8, "little")])
    assert uniform_below(3, 2, lambda count: next(given)).tolist() == [1, 2]


# -- what the accountant is told, and refusals --


def test_the_event_is_what_was_drawn():
    assert PoissonSampler(10, 0.125, 7).event(1.5, 3) == PoissonSampledGaussian(1.5, 0.125, 3)
    joined = MicroBatchSampler(10, 0.125, 7, 4).event(1.5, 3)
    assert joined == SampledRecordRelease(1.5, 0.125, 3, 4)
    allocation = AllocationSampler(50, 4)  # the last one counts in full
    assert allocation.event(1.0, 1) == RandomAllocationGaussian(1.0, 4, 4)
    assert allocation.event(1.0, 9) == RandomAllocationGaussian(1.0, 4, 12)


@pytest.mark.parametrize(
    ("sampler", "name", "arguments"),
    [
        (PoissonSampler, "num_examples", (0, 0.5, 1)),
        (PoissonSampler, "num_examples", (2.5, 0.5, 1)),
        (PoissonSampler, "sample_rate", (10, 0.0, 1)),
        (PoissonSampler, "sample_rate", (10, -0.1, 1)),
        (PoissonSampler, "sample_rate", (10, 1.1, 1)),
        (PoissonSampler, "sample_rate", (10, float("nan"), 1)),
        (PoissonSampler, "steps", (10, 0.5, 0)),
        (PoissonSampler, "steps", (10, 0.5, True)),
        (PoissonSampler, "max_batch_size", (10, 0.5, 1, 0)),
        (MicroBatchSampler, "num_micro_batches", (5, 0.1, 1, 0)),
        (AllocationSampler, "steps", (50, 1)),
    ],
)
def test_bad_values_are_named(sampler, name, arguments):
    with pytest.raises(InvalidArgumentError, match=f"Expected `{name}` to be .*, got "):
        sampler(*arguments)
