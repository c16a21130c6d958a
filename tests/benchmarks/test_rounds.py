"""Interleaving and the ratio statistic on clocks whose truth is known."""

from __future__ import annotations

import itertools

import pytest

from hf_dp.benchmarks.mode import BenchmarkMode
from hf_dp.benchmarks.modes import NON_PRIVATE
from hf_dp.benchmarks.rounds import (
    Ratio,
    enough_repeats,
    interleave,
    ratio,
    seconds_of_step,
    verdict,
)
from hf_dp.benchmarks.workload import Workload


def test_every_round_times_every_mode_and_the_order_rotates():
    called = []
    timers = {name: lambda name=name: called.append(name) or 1.0 for name in "abc"}
    heard = []
    rounds = interleave(timers, 4, heard.append)
    assert "".join(called) == "abc" + "bca" + "cab" + "abc"
    assert all(set(each) == set("abc") for each in rounds)
    assert heard == [f"round {r} of 4" for r in (1, 2, 3, 4)]


def test_a_round_is_the_median_of_turns_taken_step_by_step():
    called = []
    clock = {name: itertools.count(start) for name, start in (("a", 1.0), ("b", 11.0))}
    timers = {name: lambda name=name: called.append(name) or next(clock[name]) for name in "ab"}
    assert interleave(timers, 2, repeats=3) == [{"a": 2.0, "b": 12.0}, {"a": 5.0, "b": 15.0}]
    assert "".join(called) == "ab" + "ba" + "ab" + "ba" + "ab" + "ba"


def test_one_step_that_was_interrupted_does_not_move_a_round():
    clock = {"a": iter([1.0, 1.0, 30.0]), "b": iter([2.0, 2.0, 2.0])}
    assert interleave(
        {name: lambda name=name: next(clock[name]) for name in "ab"}, 1, repeats=3
    ) == [{"a": 1.0, "b": 2.0}]


def test_a_machine_that_slows_down_does_not_move_the_ratio():
    # 0.8 in every round; dividing medians of a drifting machine, or times of neighboring rounds,
    # would not give that
    rounds = [{NON_PRIVATE: 0.8 * drift, "mode": drift} for drift in (1.0, 1.5, 9.0, 2.0, 1.1)]
    found = ratio(rounds, "mode", NON_PRIVATE)
    assert found.median == pytest.approx(0.8)
    assert found.interquartile_range == pytest.approx(0)
    assert found.counts


def test_median_and_quartiles_by_hand():
    rounds = [{NON_PRIVATE: r, "mode": 1.0} for r in (0.9, 0.5, 0.8, 0.6, 0.7)]
    found = ratio(rounds, "mode", NON_PRIVATE)
    assert (found.median, found.interquartile_range) == (pytest.approx(0.7), pytest.approx(0.2))
    assert not found.counts


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([(0.9, 0.039)], "counts"),
        ([(0.9, 0.04)], "repeat"),
        ([(0.90, 0.01), (0.92, 0.01), (0.91, 0.01)], "agree"),
        ([(0.90, 0.01), (0.94, 0.01), (0.91, 0.01)], "differ"),
        ([(0.90, 0.01), (0.90, 0.05)], "repeat"),
    ],
)
def test_verdict(runs, expected):
    assert verdict([Ratio(*run) for run in runs]) == expected


def test_a_timing_is_long_enough():
    assert enough_repeats(3.0) == 3
    assert enough_repeats(9.0) == 1
    assert enough_repeats(0.0) > 1


def test_a_timing_is_one_step_and_cleans_up(monkeypatch):
    class Fake(BenchmarkMode):
        done: list[str] = []

        def step(self, batches):
            self.done.append("step")

        def reset(self):
            self.done.append("reset")

        def gradients(self):
            return {}

    clock = itertools.count(100.0, 6.0)
    monkeypatch.setattr("hf_dp.benchmarks.rounds.time.perf_counter", lambda: next(clock))
    mode = Fake(None, Workload("tiny"))
    assert seconds_of_step(mode, []) == 6.0
    assert mode.done == ["step", "reset"]
