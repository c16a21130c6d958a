"""Largest batch and least common multiple, with a memory limit that the test sets."""

from __future__ import annotations

import pytest
import torch

from hf_dp.benchmarks import capacity
from hf_dp.benchmarks.capacity import batch_fits, measure_capacity, physical_batches
from hf_dp.benchmarks.mode import Refused
from hf_dp.benchmarks.modes import NON_PRIVATE
from hf_dp.benchmarks.workload import Workload
from hf_dp.errors import HfDpError, UnsupportedModelError
from hf_dp.run.physical_size import largest_that_fits

TINY = Workload("tiny", device="cpu", threads=1)


@pytest.mark.parametrize("size", [*range(35), 157, 1000])
def test_the_search_finds_the_largest_size_in_few_tries(size):
    tried = []
    assert largest_that_fits(lambda b: tried.append(b) or b <= size) == size
    assert len(tried) <= 2 * size.bit_length() + 1
    assert len(set(tried)) == len(tried)


@pytest.mark.parametrize("limit", [1, 7, 8, 9])
def test_the_search_stops_at_its_limit(limit):
    tried = []
    assert largest_that_fits(lambda b: not tried.append(b), limit) == limit
    assert max(tried) <= limit


def test_least_common_multiple():
    assert physical_batches(12, 8, 1000) == (2, 3)
    assert physical_batches(157, 149, 157 * 149) == (149, 157)
    # beyond the limit: whole batches up to it, at least one
    assert physical_batches(157, 149, 1000) == (6, 6)
    assert physical_batches(2000, 1999, 1000) == (1, 1)


def test_out_of_memory_is_too_large_and_anything_else_is_not(monkeypatch):
    def steps(workload, mode, count):
        if workload.batch_size > 5:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(capacity, "_steps", steps)
    assert largest_that_fits(batch_fits(TINY, "book_keeping")) == 5

    def refuse(workload, mode, count):
        raise UnsupportedModelError("not this model")

    monkeypatch.setattr(capacity, "_steps", refuse)
    with pytest.raises(Refused, match="not this model"):
        batch_fits(TINY, "book_keeping")(1)


def test_a_real_step_fits_here():
    assert batch_fits(TINY, "book_keeping")(2)


def measure(sizes, limit=1000, seconds=None):
    """With these largest batches; an example takes 1 s non-privately and 1.25 s in the other
    modes."""
    calls = []

    def fits(workload, mode):
        if sizes[mode] is None:
            raise Refused("tied weights")
        return lambda b: b <= sizes[mode]

    def default(workload, mode, batches):
        calls.append((mode, workload.batch_size, batches))
        return workload.batch_size * batches * (1.0 if mode == NON_PRIVATE else 1.25)

    return measure_capacity(TINY, tuple(sizes), 3, limit, fits, seconds or default), calls


def test_both_modes_do_the_same_number_of_examples():
    rows, calls = measure({NON_PRIVATE: 12, "book_keeping": 8, "opacus_ghost": None})
    row = rows["book_keeping"]
    assert (row["max_batch"], row["logical_batch"], row["non_private_logical_batch"]) == (8, 24, 24)
    assert row["examples_per_second"] == pytest.approx(0.8)
    assert row["ratio"] == pytest.approx(0.8)
    assert row["counts"]
    assert rows[NON_PRIVATE]["ratio"] == 1
    assert rows["opacus_ghost"] == {"refused": "tied weights"}
    pair = [(NON_PRIVATE, 12, 2), ("book_keeping", 8, 3)]
    assert calls[3:] == pair + pair[::-1] + pair  # interleaved, the order rotating


def test_nothing_fits():
    rows, _ = measure({NON_PRIVATE: 3, "book_keeping": 0})
    assert "batch size 1" in rows["book_keeping"]["refused"]
    with pytest.raises(HfDpError, match=r"`model` 'tiny'.*out of memory"):
        measure({NON_PRIVATE: 0})


def test_a_batch_that_fitted_only_in_the_search_is_a_row_not_a_crash():
    def seconds(workload, mode, batches):
        if mode != NON_PRIVATE:
            raise Refused("out of memory")
        return 1.0

    rows, _ = measure({NON_PRIVATE: 3, "book_keeping": 3}, seconds=seconds)
    assert rows["book_keeping"]["max_batch"] == 3
    assert "when timed" in rows["book_keeping"]["refused"]


def test_real_timings_at_the_common_multiple():
    rows = measure_capacity(
        TINY,
        (NON_PRIVATE, "book_keeping"),
        3,
        100,
        lambda w, mode: lambda b: b <= 2 + len(mode) % 3,
    )
    assert (
        rows["book_keeping"]["logical_batch"] == rows["book_keeping"]["non_private_logical_batch"]
    )
    assert rows["book_keeping"]["ratio"] > 0
