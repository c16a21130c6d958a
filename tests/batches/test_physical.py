"""A draw is cut into physical batches: a partition, which one example changes by a batch at most."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dp.batches.loader import physical_batches
from hf_dp.errors import InvalidArgumentError


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


@pytest.mark.parametrize("max_tokens", [None, 12])
def test_physical_batches_of_one_shape(max_tokens):
    lengths = [1 + (7 * i) % 5 for i in range(50)]
    shapes = [(length, i % 3) for i, length in enumerate(lengths)]
    groups = physical_batches(lengths, drawn_keys(50), 4, max_tokens, shapes)
    assert sorted(position for group in groups for position in group) == list(range(50))
    assert all(len({shapes[position] for position in group}) == 1 for group in groups)
