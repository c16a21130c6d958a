"""Time modes in interleaved rounds, and take one statistic from them.

A shared machine speeds up and slows down over seconds, by more than the differences that matter.
Modes therefore take turns step by step. A round takes the median of several turns of each mode: a
step that lost its processor to another process does not count, but what a mode does in every step
does. Only times of the same round are divided by each other, and the order rotates, so that no mode
always runs first.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_dp.benchmarks.mode import BenchmarkMode
from hf_dp.benchmarks.workload import Batch

Round = dict[str, float]  # mode -> seconds for the same work

LARGEST_IQR = 0.04  # a run with a wider spread of its ratios does not count
AGREEMENT = 0.03  # runs agree when their median ratios lie within this of each other


@dataclass(frozen=True)
class Ratio:
    """Speed of a mode relative to non-private training over the rounds of one run."""

    median: float
    interquartile_range: float

    @property
    def counts(self) -> bool:
        """Return whether the machine was steady enough; otherwise the run must be repeated."""
        return self.interquartile_range < LARGEST_IQR


def interleave(
    timers: Mapping[str, Callable[[], float]],
    rounds: int,
    log: Callable[[str], None] = lambda line: None,
    repeats: int = 1,
) -> list[Round]:
    """Return, for each round, the median seconds of every timer over ``repeats`` turns.

    Each turn starts with the next timer. ``log`` is called after every round.
    """
    names = list(timers)
    results = []
    for r in range(rounds):
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(r * repeats, (r + 1) * repeats):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                seconds[name].append(timers[name]())
        results.append({name: statistics.median(each) for name, each in seconds.items()})
        log(f"round {r + 1} of {rounds}")
    return results


def ratio(rounds: Sequence[Mapping[str, float]], mode: str, baseline: str) -> Ratio:
    """Return median and interquartile range of ``time of baseline / time of mode``.

    Each ratio is of one round, of which there are at least 2. The inclusive method computes the
    quartiles.
    """
    values = [each[baseline] / each[mode] for each in rounds]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Ratio(middle, high - low)


def verdict(runs: Sequence[Ratio]) -> str:
    """Return whether runs count: ``repeat`` if one does not.

    For one run that counts, return ``counts``; for several, ``agree`` or ``differ``.
    """
    if not all(run.counts for run in runs):
        return "repeat"
    if len(runs) == 1:
        return "counts"
    medians = [run.median for run in runs]
    return "agree" if max(medians) - min(medians) <= AGREEMENT else "differ"


def speed(
    runs: Sequence[Sequence[Round]], mode: str, baseline: str, examples: int
) -> dict[str, Any]:
    """Return what a report says of a mode beside its baseline: speed, ratios of runs, verdict.

    Args: examples: of one step.
    """
    ratios = [ratio(rounds, mode, baseline) for rounds in runs]
    seconds = statistics.median(each[mode] for rounds in runs for each in rounds)
    return {
        "examples_per_second": examples / seconds,
        "ratio": statistics.median(each.median for each in ratios),
        "ratios": [{**vars(each), "counts": each.counts} for each in ratios],
        "verdict": verdict(ratios),
    }


def enough_repeats(seconds_per_step: float, at_least: float = 8.0) -> int:
    """Return how many steps last ``at_least`` seconds, so that a machine's speed averages out."""
    return max(1, math.ceil(at_least / max(seconds_per_step, 1e-6)))


def seconds_of_step(mode: BenchmarkMode, batches: Sequence[Batch]) -> float:
    """Return the wall-clock seconds of one step; leave the model without gradients."""
    gc.collect()  # what another mode left is not collected in this one's time
    _synchronize(mode)
    start = time.perf_counter()
    mode.step(batches)
    _synchronize(mode)
    seconds = time.perf_counter() - start
    mode.reset()
    return seconds


def _synchronize(mode: BenchmarkMode) -> None:
    # CUDA kernels run after the call that started them has returned.
    if mode.workload.on_cuda:
        torch.cuda.synchronize()
