"""Find the largest physical batch of each mode, and its speed there (Li et al., appendix G).

A binary search finds the largest batch that a step can run without running out of memory. To
compare two modes at their largest batches on the same number of examples and updates, both run a
logical batch of the least common multiple of the two.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_dp.benchmarks.mode import Refused
from hf_dp.benchmarks.modes import LOOP, NON_PRIVATE, build_mode, refusals
from hf_dp.benchmarks.rounds import interleave, ratio, seconds_of_step
from hf_dp.benchmarks.workload import Workload, make_batch
from hf_dp.errors import HfDpError
from hf_dp.run.memory import is_out_of_memory
from hf_dp.run.physical_size import largest_that_fits

Fits = Callable[[int], bool]


def physical_batches(one: int, other: int, limit: int) -> tuple[int, int]:
    """Return how many batches of each size make the same number of examples.

    That number is their least common multiple. Batch sizes without a common factor have a huge one:
    beyond ``limit`` examples both run whole batches up to the limit (at least one), and speeds per
    example are compared instead.
    """
    examples = math.lcm(one, other)
    if examples <= limit:
        return examples // one, examples // other
    return max(1, limit // one), max(1, limit // other)


def batch_fits(workload: Workload, mode: str) -> Fits:
    """Return a predicate: whether two steps at a batch size run without running out of memory.

    Two steps, because the second one finds the memory as training leaves it. The predicate raises
    Refused when the mode cannot run this workload at any size.
    """

    def fits(examples: int) -> bool:
        try:
            with refusals(mode):
                _steps(workload.replace(batch_size=examples), mode, 2)
        except Refused as refused:
            if not is_out_of_memory(refused.__cause__ or refused):
                raise
            return False
        finally:
            _free()
        return True

    return fits


def seconds_at(workload: Workload, mode: str, batches: int) -> float:
    """Time one logical batch of ``batches`` full physical ones, in seconds.

    Two modes at their largest batches do not fit side by side, so each timing builds a model, warms
    up, measures and frees.
    """
    try:
        with refusals(mode):
            return _time(workload, mode, batches)
    finally:
        _free()


def measure_capacity(
    workload: Workload,
    modes: Sequence[str],
    rounds: int,
    limit: int,
    fits: Callable[[Workload, str], Fits] = batch_fits,
    seconds: Callable[[Workload, str, int], float] = seconds_at,
) -> dict[str, dict[str, Any]]:
    """Measure the largest batch of each mode, and examples per second there.

    Args:
        rounds: interleaved timings of each mode.
        limit: largest logical batch in examples.
        fits: how to try a size, for tests.
        seconds: how to time a mode, for tests.

    Returns: a row for each mode: largest batch, logical batch, speed, ratio to non-private training
        with its spread; or ``refused`` where the mode cannot run the workload.
    Raises: HfDpError when non-private training itself does not fit.
    """
    rows: dict[str, dict[str, Any]] = {}
    _free()  # what the caller no longer refers to
    for mode in modes:
        if mode == LOOP:
            rows[mode] = {"refused": "its memory does not grow with the batch"}
            continue
        try:
            rows[mode] = {"max_batch": largest_that_fits(fits(workload, mode))}
        except Refused as refused:
            rows[mode] = {"refused": str(refused)}
        if rows[mode].get("max_batch") == 0:
            rows[mode] = {"refused": "out of memory at batch size 1"}
    if "refused" in rows[NON_PRIVATE]:
        raise HfDpError(
            f"Non-private training of `model` {workload.model!r} cannot run: "
            f"{rows[NON_PRIVATE]['refused']}. Choose a smaller model or `length`."
        )
    for mode in (name for name, row in rows.items() if "refused" not in row):
        base, own = rows[NON_PRIVATE]["max_batch"], rows[mode]["max_batch"]
        try:
            rows[mode] |= _pair(workload, mode, base, own, rounds, limit, seconds)
        except Refused as refused:
            # It fitted in the search, but fragmented memory may not take it again.
            rows[mode]["refused"] = f"{refused}, when timed at its largest batch"
    return rows


def _pair(
    workload: Workload,
    mode: str,
    base: int,
    own: int,
    rounds: int,
    limit: int,
    seconds: Callable[..., float],
) -> dict[str, Any]:
    """Time one mode against non-private training, each at its largest batch, interleaved."""
    base_count, count = physical_batches(base, own, limit)

    def per_example(name: str, size: int, batches: int) -> float:
        return seconds(workload.replace(batch_size=size), name, batches) / (size * batches)

    timers: Mapping[str, Callable[[], float]] = {
        NON_PRIVATE: lambda: per_example(NON_PRIVATE, base, base_count)
    }
    if mode != NON_PRIVATE:
        timers = {**timers, mode: lambda: per_example(mode, own, count)}
    timings = interleave(timers, rounds)
    result = ratio(timings, mode, NON_PRIVATE)
    return {
        "logical_batch": own * count,
        "non_private_logical_batch": base * base_count,
        "examples_per_second": 1 / statistics.median(each[mode] for each in timings),
        "ratio": result.median,
        "interquartile_range": result.interquartile_range,
        "counts": result.counts,
        "seconds_per_example": timings,
    }


def _steps(workload: Workload, mode: str, steps: int) -> None:
    runner = build_mode(mode, workload)
    batch = make_batch(workload, runner.model)
    for _ in range(steps):
        runner.step([batch])


def _time(workload: Workload, mode: str, batches: int) -> float:
    runner = build_mode(mode, workload)
    batch = make_batch(workload, runner.model)
    runner.step([batch])
    return seconds_of_step(runner, [batch] * batches)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
