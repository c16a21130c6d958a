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

from hf_dp._validate import integer
from hf_dp.benchmarks import modes
from hf_dp.benchmarks.modes import NON_PRIVATE, Refused, Report, Row
from hf_dp.benchmarks.workload import Workload, build_model, environment, make_batch

Log = Callable[[str], None]
Timers = Mapping[str, Callable[[], float]]  # by mode, what makes a step and returns its seconds
Round = dict[str, float]  # mode -> seconds for the same work

LARGEST_IQR = 0.04  # a run with a wider spread of its ratios does not count
_WARMUPS = 2  # untimed steps of every mode
_SECONDS_OF_ROUND = 8.0  # of one mode, so that a machine's speed averages out


def measure_throughput(
    workload: Workload,
    names: Sequence[str],
    rounds: int = 7,
    repeats: int | None = None,
    log: Log = lambda line: None,
) -> Report:
    """Time modes of :data:`hf_dp.benchmarks.modes.MODES`, and non_private in any case; return what
    ``--json`` prints.

    Modes that leave the model as it was share one, so that no difference is due to memory layout.

    Args: rounds: at least 3, the fewest that have a spread. repeats: steps of every mode in a
        round; None for what takes 8 seconds.
    """
    integer("rounds", rounds, 3)
    timers: dict[str, Callable[[], float]] = {}
    rows: dict[str, Row] = {}
    torch.set_num_threads(workload.threads or 1)
    shared = build_model(workload)
    batch = make_batch(workload, shared)
    for name in modes.check_modes(names):
        log(f"warming up {name}")
        try:
            mode = modes.build_mode(name, workload, shared)
            with modes.refusals(name):
                mode.step(batch)
            mode.reset()
            timers[name] = partial(modes.seconds_of_step, mode, batch)
            rows[name] = {"note": mode.note}
        except Refused as refused:
            shared.zero_grad(set_to_none=True)
            rows[name] = {"refused": str(refused)}
    modes.refuse_without_yardstick(workload, rows[NON_PRIVATE])
    if repeats is None:
        repeats = math.ceil(_SECONDS_OF_ROUND / timers[NON_PRIVATE]())
    integer("repeats", repeats, 1)
    interleave(timers, _WARMUPS)
    log(f"rounds of {repeats} steps")
    found = interleave(timers, rounds, log, repeats)
    for name in timers:
        seconds = statistics.median(each[name] for each in found)
        ratio, iqr = spread(found, name, NON_PRIVATE)
        rows[name] |= {
            "examples_per_second": workload.per_device_train_batch_size / seconds,
            "ratio": ratio,
            "interquartile_range": iqr,
            "verdict": "counts" if iqr < LARGEST_IQR else "repeat",
        }
    return {
        "benchmark": "throughput",
        "environment": environment(workload),
        "workload": {**vars(workload)},
        "protocol": {"rounds": rounds, "repeats": repeats},
        "modes": rows,
        "rounds": found,
    }


def interleave(
    timers: Timers, rounds: int, log: Log = lambda line: None, repeats: int = 1
) -> list[Round]:
    """Return, for each round, the median seconds of every timer over ``repeats`` turns, each of
    which starts with the next timer."""
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
    """Return median and interquartile range (inclusive quartiles) of ``time of baseline / time of
    mode``, each of one round."""
    values = [each[baseline] / each[mode] for each in rounds]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, high - low
