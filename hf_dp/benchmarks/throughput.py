"""Measure the speed of every mode at one batch size, in interleaved rounds.

A shared machine speeds up and slows down over seconds, by more than the differences that matter.
Modes therefore take turns step by step. A round takes the median of several turns of each mode: a
step that lost its processor to another process does not count, but what a mode does in every step
does. Only times of the same round are divided by each other, and the order rotates, so that no mode
always runs first.
"""

from __future__ import annotations

import ctypes
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hf_dp.benchmarks.modes import (
    NON_PRIVATE,
    Refused,
    build_mode,
    check_modes,
    refusals,
    seconds_of_step,
    without_yardstick,
)
from hf_dp.benchmarks.workload import (
    Protocol,
    Workload,
    build_model,
    environment,
    make_batch,
    threads_of,
)

Log = Callable[[str], None]
Round = dict[str, float]  # mode -> seconds for the same work

LARGEST_IQR = 0.04  # a run with a wider spread of its ratios does not count
AGREEMENT = 0.03  # runs agree when their median ratios lie within this of each other
_SECONDS_OF_ROUND = 8.0  # of one mode, so that a machine's speed averages out
# <malloc.h>: which numbers mallopt takes
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def measure_throughput(
    workload: Workload,
    modes: Sequence[str],
    protocol: Protocol | None = None,
    log: Log = lambda line: None,
) -> dict[str, Any]:
    """Time modes of :data:`hf_dp.benchmarks.modes.MODES`, and non_private in any case.

    Returns: what ``--json`` prints: environment, workload, one row a mode, and all raw rounds.
    Raises: InvalidArgumentError; HfDpError when non-private training itself cannot run.
    """
    protocol, names = protocol or Protocol(), check_modes(modes)
    machine = environment(workload)
    machine["keeps_freed_memory"] = workload.device == "cpu" and keep_freed_memory()
    with threads_of(workload):
        timers, rows = _prepare(workload, names, log)
        repeats = protocol.repeats or math.ceil(_SECONDS_OF_ROUND / timers[NON_PRIVATE]())
        runs = time_runs(timers, protocol, repeats, log)
    for name in timers:
        rows[name] |= speed(runs, name, workload.per_device_train_batch_size)
    return {
        "benchmark": "throughput",
        "environment": machine,
        "workload": {**vars(workload)},
        "protocol": {**vars(protocol), "repeats": repeats},
        "modes": rows,
        "runs": runs,
    }


def _prepare(
    workload: Workload, names: Sequence[str], log: Log
) -> tuple[dict[str, Callable[[], float]], dict[str, dict[str, Any]]]:
    """Build each mode and run it once; return a timer of each that can run, and all rows.

    Modes that leave the model as it was share one, so that no difference is due to memory layout.
    """
    shared = build_model(workload)
    batches = [make_batch(workload, shared)]
    timers: dict[str, Callable[[], float]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        log(f"warming up {name}")
        try:
            mode = build_mode(name, workload, shared)
            with refusals(name):
                mode.step(batches)
            mode.reset()
            timers[name], rows[name] = partial(seconds_of_step, mode, batches), {"note": mode.note}
        except Refused as refused:
            shared.zero_grad(set_to_none=True)
            rows[name] = {"refused": str(refused)}
    if NON_PRIVATE not in timers:
        raise without_yardstick(workload, rows[NON_PRIVATE]["refused"])
    return timers, rows


def time_runs(
    timers: Mapping[str, Callable[[], float]], protocol: Protocol, repeats: int, log: Log
) -> list[list[Round]]:
    """Return the rounds of every run, each run warmed up first.

    Args: timers: by mode, what makes a step and returns its seconds. repeats: steps in a round.
    """
    runs = []
    for number in range(protocol.runs):
        for timer in timers.values():
            for _ in range(protocol.warmups):
                timer()
        log(
            f"run {number + 1} of {protocol.runs}: rounds of {repeats} steps in {len(timers)} modes"
        )
        runs.append(interleave(timers, protocol.rounds, log, repeats))
    return runs


def speed(runs: Sequence[Sequence[Round]], mode: str, examples: int) -> dict[str, Any]:
    """Return what a report says of a mode: speed, ratios of runs to non-private, verdict.

    Args: examples: of one step.
    """
    ratios = [ratio(rounds, mode, NON_PRIVATE) for rounds in runs]
    seconds = statistics.median(each[mode] for rounds in runs for each in rounds)
    return {
        "examples_per_second": examples / seconds,
        "ratio": statistics.median(each.median for each in ratios),
        "ratios": [{**vars(each), "counts": each.counts} for each in ratios],
        "verdict": verdict(ratios),
    }


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
    log: Log = lambda line: None,
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


def keep_freed_memory() -> bool:
    """Tell the C library's allocator to keep what is freed; False where it is not glibc.

    By default glibc gives freed memory back to the operating system and takes it again a moment
    later, page by page. On virtual machines such page faults cost more than the arithmetic that
    they interrupt, and they fall on one mode or the other by chance. Whether a large block is
    mapped again depends on the order of the modes, so nothing is mapped. For a training of your
    own, ``MALLOC_TRIM_THRESHOLD_=2000000000 MALLOC_MMAP_MAX_=0`` in the environment do the same.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # mallopt returns 1 for success
    return bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)) and bool(mallopt(_M_MMAP_MAX, 0))
