"""Measure the speed of every mode at one batch size, in interleaved rounds.

A shared machine speeds up and slows down over seconds, by more than the differences that matter.
Modes therefore take turns step by step. A round takes the median of several turns of each mode: a
step that lost its processor to another process does not count, but what a mode does in every step
does. Only times of the same round are divided by each other, and the order rotates, so that no mode
always runs first.

By default glibc gives freed memory back to the operating system and takes it again a moment later.
On virtual machines such page faults cost more than the arithmetic that they interrupt, and they
fall on one mode or the other by chance: set MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_MAX_.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from hf_dp.benchmarks.modes import (
    NON_PRIVATE,
    Refused,
    Report,
    Row,
    build_mode,
    check_modes,
    refusals,
    refuse_without_yardstick,
    seconds_of_step,
)
from hf_dp.benchmarks.workload import (
    Protocol,
    Workload,
    build_model,
    environment,
    make_batch,
)

Log = Callable[[str], None]
Timers = Mapping[str, Callable[[], float]]  # by mode, what makes a step and returns its seconds
Round = dict[str, float]  # mode -> seconds for the same work

LARGEST_IQR = 0.04  # a run with a wider spread of its ratios does not count
AGREEMENT = 0.03  # runs agree when their median ratios lie within this of each other
_SECONDS_OF_ROUND = 8.0  # of one mode, so that a machine's speed averages out


def measure_throughput(
    workload: Workload,
    modes: Sequence[str],
    protocol: Protocol | None = None,
    log: Log = lambda line: None,
) -> Report:
    """Time modes of :data:`hf_dp.benchmarks.modes.MODES`, and non_private in any case.

    Modes that leave the model as it was share one, so that no difference is due to memory layout.

    Returns: what ``--json`` prints: environment, workload, one row a mode, and all raw rounds."""
    protocol, names = protocol or Protocol(), check_modes(modes)
    timers: dict[str, Callable[[], float]] = {}
    rows: dict[str, Row] = {}
    torch.set_num_threads(workload.threads or 1)
    shared = build_model(workload)
    batches = [make_batch(workload, shared)]
    for name in names:
        log(f"warming up {name}")
        try:
            mode = build_mode(name, workload, shared)
            with refusals(name):
                mode.step(batches)
            mode.reset()
            timers[name] = partial(seconds_of_step, mode, batches)
            rows[name] = {"note": mode.note}
        except Refused as refused:
            shared.zero_grad(set_to_none=True)
            rows[name] = {"refused": str(refused)}
    refuse_without_yardstick(workload, rows[NON_PRIVATE])
    repeats = protocol.repeats or math.ceil(_SECONDS_OF_ROUND / timers[NON_PRIVATE]())
    runs = []
    for number in range(protocol.runs):
        interleave(timers, protocol.warmups)
        log(f"run {number + 1} of {protocol.runs}: rounds of {repeats} steps")
        runs.append(interleave(timers, protocol.rounds, log, repeats))
    for name in timers:
        seconds = statistics.median(each[name] for rounds in runs for each in rounds)
        spreads = [spread(rounds, name, NON_PRIVATE) for rounds in runs]
        rows[name] |= {
            "examples_per_second": workload.per_device_train_batch_size / seconds,
            "ratio": statistics.median(median for median, _ in spreads),
            "ratios": [{"median": m, "interquartile_range": iqr} for m, iqr in spreads],
            "verdict": verdict(spreads),
        }
    return {
        "benchmark": "throughput",
        "environment": environment(workload),
        "workload": {**vars(workload)},
        "protocol": {**vars(protocol), "repeats": repeats},
        "modes": rows,
        "runs": runs,
    }


def interleave(
    timers: Timers, rounds: int, log: Log = lambda line: None, repeats: int = 1
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


def spread(rounds: Sequence[Mapping[str, float]], mode: str, baseline: str) -> tuple[float, float]:
    """Return median and interquartile range of ``time of baseline / time of mode``.

    Each ratio is of one round, of which there are at least 2. The inclusive method computes the
    quartiles.
    """
    values = [each[baseline] / each[mode] for each in rounds]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, high - low


def verdict(runs: Sequence[tuple[float, float]]) -> str:
    """Return whether runs count: ``repeat`` if the machine was not steady enough in one.

    For one run that counts, return ``counts``; for several, ``agree`` or ``differ``.

    Args: runs: median and interquartile range of each.
    """
    if any(iqr >= LARGEST_IQR for _, iqr in runs):
        return "repeat"
    if len(runs) == 1:
        return "counts"
    medians = [median for median, _ in runs]
    return "agree" if max(medians) - min(medians) <= AGREEMENT else "differ"
