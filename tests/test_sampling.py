"""Poisson draws, tested against the binomial law, and their cut into physical batches.

Statistical tests draw a few hundred thousand bits and reject below p = 1e-6, so a right sampler
fails one run in a million or so; the planted samplers below fail by tens of orders of magnitude.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from hf_dp.accounting import PoissonSampledGaussian, TruncatedPoissonSampledGaussian, epsilon
from hf_dp.batches.physical import physical_batches
from hf_dp.errors import InvalidArgumentError
from hf_dp.plans.dp_fp.base import MicroBatchSampler
from hf_dp.plans.draws import PoissonSampler

REJECT = 1e-6
Draw = Callable[[], list[int]]


def membership(draw: Draw, num_examples: int, steps: int) -> np.ndarray:
    """(steps, N): who joined."""
    joined = np.zeros((steps, num_examples), dtype=bool)
    for step in range(steps):
        joined[step, draw()] = True
    return joined


def poisson_p_values(draw: Draw, num_examples: int, rate: float, steps: int) -> dict[str, float]:
    """p-values of what Poisson sampling implies; every one must be unremarkable."""
    joined = membership(draw, num_examples, steps)
    sizes, counts = joined.sum(1), joined.sum(0)
    variance = rate * (1 - rate)
    centered = joined - rate
    scale = variance * np.sqrt(steps * num_examples)
    return {
        "batch sizes are Binomial(N, q)": dispersion(sizes, num_examples, rate),
        "inclusions of an example are Binomial(steps, q)": dispersion(counts, steps, rate),
        "all inclusions together": stats.binomtest(int(joined.sum()), joined.size, rate).pvalue,
        "steps are independent": normal_p(np.sum(centered[1:] * centered[:-1]) / scale),
        "steps are independent at a distance of two": normal_p(
            np.sum(centered[2:] * centered[:-2]) / scale
        ),
        "neighboring rows are independent": normal_p(
            np.sum(centered[:, 1:] * centered[:, :-1]) / scale
        ),
    }


def dispersion(counts: np.ndarray, trials: int, rate: float) -> float:
    """Two-sided chi-square test of the variance: too even is as wrong as too uneven."""
    statistic = float(np.square(counts - trials * rate).sum() / (trials * rate * (1 - rate)))
    below = stats.chi2.cdf(statistic, len(counts))
    return 2 * min(below, 1 - below)


def normal_p(z: float) -> float:
    return float(2 * stats.norm.sf(abs(z)))


@pytest.mark.parametrize(("num_examples", "rate"), [(400, 0.05), (300, 0.5), (50, 0.9)])
def test_draws_are_poisson(num_examples, rate):
    sampler = PoissonSampler(num_examples, rate, 1)
    p_values = poisson_p_values(sampler.draw, num_examples, rate, steps=800)
    assert min(p_values.values()) > REJECT, p_values


def test_batch_sizes_follow_the_binomial_distribution():
    """Not its mean and variance alone: a chi-square test over the whole distribution."""
    sampler = PoissonSampler(40, 0.1, 1)
    observed = np.bincount([len(sampler.draw()) for _ in range(4000)], minlength=41)
    expected = 4000 * stats.binom.pmf(np.arange(41), 40, 0.1)
    common = expected >= 5
    table = (
        np.append(observed[common], observed[~common].sum()),
        np.append(expected[common], expected[~common].sum()),
    )
    assert stats.chisquare(*table).pvalue > REJECT


def shuffling(num_examples: int, size: int) -> Draw:
    order: list[int] = []

    def draw() -> list[int]:
        nonlocal order
        if len(order) < size:
            order = random.sample(range(num_examples), num_examples)
        batch, order = order[:size], order[size:]
        return batch

    return draw


@pytest.mark.parametrize(
    "planted",
    [
        shuffling(400, 20),
        lambda: random.sample(range(400), 20),
        lambda: [i for i in range(400) if random.random() < 0.04],
        lambda: [i for i in range(400) if random.randrange(64) < 4],
    ],
    ids=["shuffled epochs", "fixed size", "wrong rate", "rate rounded to 6 bits"],
)
def test_planted_samplers_are_seen(planted):
    assert min(poisson_p_values(planted, 400, 0.05, steps=800).values()) < REJECT


def test_planted_correlated_steps_are_seen():
    previous: list[int] = []

    def draw() -> list[int]:
        nonlocal previous
        kept = [i for i in previous if random.random() < 0.5]
        fresh = [i for i in range(400) if i not in previous and random.random() < 0.05 * 0.5 / 0.95]
        previous = kept + fresh
        return previous

    assert poisson_p_values(draw, 400, 0.05, steps=800)["steps are independent"] < REJECT


def test_a_capped_draw_keeps_a_uniformly_random_part():
    """Each of the examples of a draw that is too large is kept with the same probability, and the
    others as ever."""
    sampler = PoissonSampler(40, 0.5, 1, max_batch_size=15)
    draws = [sampler.draw() for _ in range(4000)]
    assert max(map(len, draws)) == 15
    assert all(draw == sorted(set(draw)) for draw in draws)
    sizes = np.bincount([len(draw) for draw in draws], minlength=16)
    expected = stats.binom.pmf(np.arange(16), 40, 0.5)
    expected[15] = stats.binom.sf(14, 40, 0.5)
    common = 4000 * expected >= 5
    assert (
        stats.chisquare(
            np.append(sizes[common], sizes[~common].sum()),
            4000 * np.append(expected[common], expected[~common].sum()),
        ).pvalue
        > REJECT
    )
    full = np.concatenate([draw for draw in draws if len(draw) == 15])
    assert stats.chisquare(np.bincount(full, minlength=40)).pvalue > REJECT


def test_planted_cut_by_position_is_seen():
    sampler = PoissonSampler(40, 0.5, 1)
    full = np.concatenate(
        [draw[:15] for draw in (sampler.draw() for _ in range(4000)) if len(draw) >= 15]
    )
    assert stats.chisquare(np.bincount(full, minlength=40)).pvalue < REJECT


def test_a_cap_that_cannot_bind_changes_nothing_but_is_said():
    assert PoissonSampler(10, 0.5, 1, max_batch_size=10).event(
        1.0, 3
    ) == TruncatedPoissonSampledGaussian(1.0, 0.5, 3, 10, 10)
    assert epsilon(TruncatedPoissonSampledGaussian(1.0, 0.5, 3, 10, 10), 1e-5) == epsilon(
        PoissonSampledGaussian(1.0, 0.5, 3), 1e-5
    )
    with pytest.raises(InvalidArgumentError, match="max_batch_size"):
        PoissonSampler(10, 0.5, 1, max_batch_size=0)


# -- the threshold, bit by bit
# -----------------------------------------------------------------------------------------


def bits(*values: int) -> Callable[[int], bytes]:
    content = np.array(values, dtype=np.uint64).tobytes()

    def source(count: int) -> bytes:
        assert count == len(content), "one 64-bit number for each example, no more and no less"
        return content

    return source


@pytest.mark.parametrize(
    ("rate", "threshold"), [(0.5, 2**63), (0.25, 2**62), (2**-64, 1), (1 - 2**-53, 2**64 - 2**11)]
)
def test_an_example_joins_exactly_below_the_threshold(rate, threshold):
    source = bits(threshold - 1, threshold, 0, 2**64 - 1)
    assert PoissonSampler(4, rate, 1, random_bytes=source).draw() == [0, 2]


@pytest.mark.parametrize("rate", [0.1, 1 / 3, 0.015204, 1e-9])
def test_the_probability_is_exact_to_the_last_bit(rate):
    threshold = round(rate * 2**64)
    assert abs(threshold / 2**64 - rate) <= 2**-65
    source = bits(threshold - 1, threshold)
    assert PoissonSampler(2, rate, 1, random_bytes=source).draw() == [0]


def test_rate_one_takes_everyone_always():
    assert list(PoissonSampler(5, 1.0, 3)) == [[0, 1, 2, 3, 4]] * 3


def test_an_empty_draw_is_a_step():
    assert list(PoissonSampler(3, 2.0**-64, 4, random_bytes=bits(9, 9, 9))) == [[]] * 4
    assert len(PoissonSampler(3, 0.5, 4)) == 4


def test_indices_increase():
    draw = PoissonSampler(1000, 0.5, 1).draw()
    assert draw == sorted(set(draw))
    assert all(isinstance(i, int) and 0 <= i < 1000 for i in draw)


# -- where the randomness comes from
# -----------------------------------------------------------------------------------


def seed_everything() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def test_seeds_do_not_repeat_a_draw():
    draws = []
    for _ in range(2):
        seed_everything()
        draws.append(PoissonSampler(500, 0.5, 1).draw())
    assert draws[0] != draws[1]  # equal with probability 2**-500


def test_drawing_leaves_the_global_generators_alone():
    seed_everything()
    expected = (torch.rand(3), np.random.rand(3).tolist(), random.random())
    seed_everything()
    list(PoissonSampler(100, 0.3, 5))
    found = (torch.rand(3), np.random.rand(3).tolist(), random.random())
    assert torch.equal(found[0], expected[0])
    assert found[1:] == expected[1:]


def test_the_default_source_is_the_operating_system():
    assert PoissonSampler(1, 0.5, 1).random_bytes is os.urandom


def test_the_source_is_not_shown():
    assert "random_bytes" not in repr(PoissonSampler(1, 0.5, 1))


# -- coupling and refusals
# ---------------------------------------------------------------------------------------------


def test_the_event_is_what_was_drawn():
    assert PoissonSampler(10, 0.125, 7).event(1.5, 3) == PoissonSampledGaussian(1.5, 0.125, 3)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("num_examples", (0, 0.5, 1)),
        ("num_examples", (2.5, 0.5, 1)),
        ("sample_rate", (10, 0.0, 1)),
        ("sample_rate", (10, -0.1, 1)),
        ("sample_rate", (10, 1.1, 1)),
        ("sample_rate", (10, float("nan"), 1)),
        ("steps", (10, 0.5, 0)),
        ("steps", (10, 0.5, True)),
    ],
)
def test_bad_values_are_named(name, arguments):
    with pytest.raises(InvalidArgumentError, match=f"Expected `{name}` to be .*, got "):
        PoissonSampler(*arguments)


# -- physical batches
# --------------------------------------------------------------------------------------------------


def drawn_keys(count, seed=0):
    return np.random.default_rng(seed).integers(0, 2**63, count).tolist()


@pytest.mark.parametrize("size", [1, 3, 7, 100])
@pytest.mark.parametrize("count", [0, 1, 6, 7, 50])
def test_physical_batches_are_a_partition(count, size):
    lengths = [(7 * i) % 13 for i in range(count)]
    groups = physical_batches(lengths, drawn_keys(count), size)
    assert sorted(position for group in groups for position in group) == list(range(count))
    assert all(1 <= len(group) <= size for group in groups)


def test_physical_batches_put_similar_lengths_together():
    lengths = [3, 50, 4, 49, 2, 51]
    groups = physical_batches(lengths, drawn_keys(6), 3)
    assert [{lengths[position] for position in group} for group in groups] == [
        {51, 50, 49},
        {4, 3, 2},
    ]


def test_examples_of_one_length_are_cut_by_their_keys_alone():
    keys = [0b0011 << 60, 0b1100 << 60, 0b1000 << 60, 0b0001 << 60, 0b0010 << 60]
    assert physical_batches([7] * 5, keys, 2) == [[1, 2], [0, 4], [3]]
    assert physical_batches([7] * 5, keys, 3) == [[1, 2], [0, 4, 3]]


def test_batches_are_as_full_as_leaves_of_a_trie():
    """Leaves of a trie of random keys are filled to ln 2 (Knuth, volume 3, section 6.3), averaged
    over numbers of keys from one to its double."""
    fill = [
        count / len(physical_batches([7] * count, drawn_keys(count), 32)) / 32
        for count in (5_000, 5_946, 7_071, 8_409)
    ]
    assert np.mean(fill) == pytest.approx(np.log(2), rel=0.02)


def regrouped(lengths, keys, size, max_tokens, shapes, without):
    """How many others stand in another group once one example is left out."""

    def groups(kept):
        of_kept = [lengths[i] for i in kept], [keys[i] for i in kept]
        alike = None if shapes is None else [shapes[i] for i in kept]
        cut = physical_batches(*of_kept, size, max_tokens, alike)
        return {frozenset(kept[place] for place in group) for group in cut}

    everyone = list(range(len(lengths)))
    changed = groups([i for i in everyone if i != without]) - groups(everyone)
    return sum(map(len, changed))


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_one_example_less_regroups_at_most_a_batch(data):
    count = data.draw(st.integers(2, 40))
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    keys = data.draw(st.lists(st.integers(0, 2**63), min_size=count, max_size=count, unique=True))
    size, max_tokens = data.draw(st.integers(1, 9)), data.draw(st.sampled_from([None, 12, 60]))
    shapes = data.draw(st.sampled_from([None, [i % 2 for i in range(count)]]))
    worst = max(
        regrouped(lengths, keys, size, max_tokens, shapes, without) for without in range(count)
    )
    assert worst <= size


def test_planted_full_batches_regroup_everyone():
    """Planted: the cut with the fewest batches, which fills each before the next begins."""
    lengths = [40 - i // 4 for i in range(64)]

    def groups(first):
        kept = list(range(first, 64))
        return {frozenset(kept[i : i + 4]) for i in range(0, len(kept), 4)}

    assert sum(map(len, groups(1) - groups(0))) == 63
    assert regrouped(lengths, drawn_keys(64), 4, None, None, 0) <= 4


def test_an_empty_draw_has_no_physical_batch():
    assert physical_batches([], [], 8) == []


@pytest.mark.parametrize("size", [0, -1, 2.5, None])
def test_bad_physical_size(size):
    with pytest.raises(InvalidArgumentError, match="`size` to be"):
        physical_batches([1, 2], [1, 2], size)


@pytest.mark.parametrize("max_tokens", [1, 12, 40, 1000])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_physical_batches_by_tokens(size, max_tokens):
    lengths = [1 + (7 * i) % 13 for i in range(50)]
    groups = physical_batches(lengths, drawn_keys(50), size, max_tokens)
    assert sorted(position for group in groups for position in group) == list(range(50))
    for group in groups:
        padded = len(group) * max(lengths[position] for position in group)
        assert len(group) <= size and (padded <= max_tokens or len(group) == 1)


def test_short_examples_come_in_larger_batches_than_long_ones():
    cut = physical_batches([12, 2, 2, 6, 2, 6, 2], drawn_keys(7), 100, 12)
    assert [len(group) for group in cut] == [1, 2, 4]


@pytest.mark.parametrize("max_tokens", [0, -5, 2.5])
def test_bad_number_of_tokens(max_tokens):
    with pytest.raises(InvalidArgumentError, match="`max_tokens` to be"):
        physical_batches([1, 2], [1, 2], 4, max_tokens)


@pytest.mark.parametrize(("rate", "micro"), [(0.03, 5), (0.4, 2), (0.9, 3)])
def test_micro_batches_are_independent_poisson_draws(rate, micro):
    sampler = MicroBatchSampler(40, rate, 1, micro)
    waiting: list[list[int]] = []

    def draw() -> list[int]:
        if not waiting:
            waiting.extend(sampler.micro_batches())
        return waiting.pop()

    assert min(poisson_p_values(draw, 40, rate, 6000).values()) > REJECT
    off = poisson_p_values(draw, 40, rate * 1.1, 6000)
    assert min(off.values()) < REJECT


def test_a_joined_draw_holds_a_record_as_often_as_it_was_drawn():
    sampler = MicroBatchSampler(30, 0.2, 4, 8)
    counts = np.concatenate(
        [np.bincount(draw, minlength=30) for _ in range(500) for draw in sampler]
    )
    observed = np.bincount(counts, minlength=9)
    expected = stats.binom.pmf(np.arange(9), 8, 0.2) * len(counts)
    kept = expected > 5
    assert stats.chisquare(
        [*observed[kept], observed[~kept].sum()], [*expected[kept], expected[~kept].sum()]
    ).pvalue > REJECT  # fmt: skip
    assert len(sampler) == 4


def test_a_small_rate_costs_as_many_random_numbers_as_records_drawn():
    asked: list[int] = []

    def counted(count: int) -> bytes:
        asked.append(count)
        return os.urandom(count)

    sizes = [
        len(MicroBatchSampler(67_349, 32 / (32 * 67_349), 1, 32, random_bytes=counted).draw())
        for _ in range(300)
    ]
    assert sum(asked) / 300 < 8 * 200
    assert (
        stats.kstest(
            np.array(sizes) + np.random.default_rng(0).random(300), lambda x: _poisson_cdf(x, 32)
        ).pvalue
        > REJECT
    )


def _poisson_cdf(x: np.ndarray, mean: float) -> np.ndarray:
    """Of a Poisson variable plus a uniform one."""
    whole = np.floor(x)
    return stats.poisson.cdf(whole - 1, mean) + (x - whole) * stats.poisson.pmf(whole, mean)


def test_every_record_in_every_micro_batch_at_rate_1():
    assert MicroBatchSampler(3, 1.0, 1, 2).micro_batches() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ((0, 0.1, 1, 1), "num_examples"),
        ((5, 1.5, 1, 1), "sample_rate"),
        ((5, 0.1, 1, 0), "num_micro"),
    ],
)
def test_bad_micro_batches_are_named(values, name):
    with pytest.raises(InvalidArgumentError, match=name):
        MicroBatchSampler(*values)


@pytest.mark.parametrize("max_tokens", [None, 12])
def test_physical_batches_of_one_shape(max_tokens):
    lengths = [1 + (7 * i) % 5 for i in range(50)]
    shapes = [(length, i % 3) for i, length in enumerate(lengths)]
    groups = physical_batches(lengths, drawn_keys(50), 4, max_tokens, shapes)
    assert sorted(position for group in groups for position in group) == list(range(50))
    assert all(len({shapes[position] for position in group}) == 1 for group in groups)
