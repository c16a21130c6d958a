"""Measure the speed of every mode at one batch size, beside the bound that arithmetic sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from hf_dp import _validate
from hf_dp.benchmarks.allocator import keep_freed_memory
from hf_dp.benchmarks.bound import Flops, count_flops, trace_model
from hf_dp.benchmarks.capacity import measure_capacity
from hf_dp.benchmarks.environment import environment
from hf_dp.benchmarks.mode import BenchmarkMode, Refused
from hf_dp.benchmarks.modes import NON_PRIVATE, build_mode, check_modes, refusals
from hf_dp.benchmarks.operators import left_over, operator_seconds
from hf_dp.benchmarks.rounds import (
    Round,
    enough_repeats,
    interleave,
    seconds_of_step,
    speed,
)
from hf_dp.benchmarks.workload import Batch, Workload, build_model, make_batch, threads_of
from hf_dp.errors import HfDpError

Log = Callable[[str], None]


@dataclass(frozen=True)
class Protocol:
    """How a measurement is timed.

    Attributes:
        rounds: timings of each mode in a run.
        warmups: steps of each mode before a run, not timed.
        repeats: steps of each mode in a round; None for the number that lasts 8 seconds.
        runs: repetitions of the whole.
        profile: also measure time by operator.
        max_batch: also measure the largest batch of each mode and the speed there (CUDA).
        lcm_limit: the largest logical batch then.
    """

    rounds: int = 7
    warmups: int = 2
    repeats: int | None = None
    runs: int = 1
    profile: bool = False
    max_batch: bool = False
    lcm_limit: int = 16384

    def __post_init__(self) -> None:
        # Three rounds are the fewest that have a spread.
        for name, least in {"rounds": 3, "warmups": 1, "runs": 1, "lcm_limit": 1}.items():
            object.__setattr__(self, name, _validate.integer(name, getattr(self, name), least))
        if self.repeats is not None:
            object.__setattr__(self, "repeats", _validate.integer("repeats", self.repeats, 1))


@dataclass
class Bench:
    """The modes that can run the workload, warmed up, and why the others cannot."""

    modes: dict[str, BenchmarkMode] = field(default_factory=dict)
    batches: dict[str, Sequence[Batch]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def time(self, name: str) -> float:
        """Return the seconds of one step of one mode."""
        return seconds_of_step(self.modes[name], self.batches[name])


def measure_throughput(
    workload: Workload,
    modes: Sequence[str],
    protocol: Protocol | None = None,
    log: Log = lambda line: None,
) -> dict[str, Any]:
    """Time every mode; see :mod:`hf_dp.benchmarks.rounds` for how.

    Args:
        modes: names of :func:`hf_dp.benchmarks.modes.mode_names`; non_private is always timed.
        log: called with progress.

    Returns: what ``--json`` writes: environment, workload, flops, one row a mode, and all raw
        rounds.
    Raises: InvalidArgumentError; HfDpError when non-private training itself cannot run.
    """
    protocol = protocol or Protocol()
    names = check_modes(modes)
    if protocol.max_batch and not workload.on_cuda:
        raise _validate.invalid(
            "max_batch",
            True,
            "only with `device` 'cuda'",
            "Use `hf-dp bench memory` for memory on the CPU.",
        )
    with threads_of(workload):
        return _measure(workload, names, protocol, log)


def _measure(
    workload: Workload, names: Sequence[str], protocol: Protocol, log: Log
) -> dict[str, Any]:
    machine = environment(workload) | {
        "keeps_freed_memory": not workload.on_cuda and keep_freed_memory()
    }
    shared = build_model(workload)
    flops = count_flops(trace_model(shared, workload))
    bench = _prepare(workload, names, shared, log)
    timers = {name: partial(bench.time, name) for name in bench.modes}
    repeats = protocol.repeats or enough_repeats(timers[NON_PRIVATE]())
    runs = time_runs(timers, protocol, repeats, log)
    report = {
        "benchmark": "throughput",
        "environment": machine,
        "workload": workload.to_dict(),
        "protocol": {**vars(protocol), "repeats": repeats},
        "flops_per_example": vars(flops),
        "modes": {name: _row(name, bench, runs, flops, workload.examples) for name in names},
        "runs": runs,
    }
    if protocol.profile:
        log("profiling")
        report["operators"] = _profile(bench)
        report["forms"] = {name: _forms(mode) for name, mode in bench.modes.items() if mode.forms()}
    if protocol.max_batch:
        log("searching the largest batches")
        del shared, bench  # the search needs the whole device
        report["max_batch"] = measure_capacity(workload, names, protocol.rounds, protocol.lcm_limit)
    return report


def _prepare(workload: Workload, names: Sequence[str], shared: nn.Module, log: Log) -> Bench:
    """Build each mode and run it once.

    Modes that leave the model as it was share one, so that no difference is due to memory layout.
    """
    bench = Bench()
    batch = make_batch(workload, shared)
    for name in names:
        log(f"warming up {name}")
        try:
            mode = build_mode(name, workload, shared)
            with refusals(name):
                mode.step([batch])
            mode.reset()
            bench.modes[name], bench.batches[name] = mode, [batch]
        except Refused as refused:
            shared.zero_grad(set_to_none=True)
            bench.refused[name] = str(refused)
    if NON_PRIVATE in bench.refused:
        raise HfDpError(
            f"Non-private training of `model` {workload.model!r} at `batch_size` "
            f"{workload.examples} cannot run: {bench.refused[NON_PRIVATE]}. Choose a smaller "
            "batch_size, length or model."
        )
    return bench


def time_runs(
    timers: Mapping[str, Callable[[], float]], protocol: Protocol, repeats: int, log: Log
) -> list[list[Round]]:
    """Return the rounds of every run, each run warmed up first.

    Args:
        timers: by mode, what runs one step and returns its seconds.
        repeats: steps of each mode in a round.
        log: called with progress.
    """
    runs = []
    for number in range(protocol.runs):
        title = f"run {number + 1} of {protocol.runs}"
        for timer in timers.values():
            for _ in range(protocol.warmups):
                timer()
        log(f"{title}: {protocol.rounds} rounds of {repeats} steps in {len(timers)} modes")
        tell = partial(_titled, log, title)
        runs.append(interleave(timers, protocol.rounds, tell, repeats))
    return runs


def _titled(log: Log, title: str, line: str) -> None:
    log(f"{title}: {line}")


def _row(
    name: str, bench: Bench, runs: Sequence[Sequence[Round]], flops: Flops, examples: int
) -> dict[str, Any]:
    if name in bench.refused:
        return {"refused": bench.refused[name]}
    return {
        **speed(runs, name, NON_PRIVATE, examples),
        "bound": flops.bound(name),
        "bound_symmetric": flops.bound(name, symmetric=True),
        "note": bench.modes[name].note,
    }


def _forms(mode: BenchmarkMode) -> list[dict[str, Any]]:
    return [
        {"shape": list(shape), "form": form, "parameters": count}
        for (shape, form), count in sorted(mode.forms().items())
    ]


def _profile(bench: Bench) -> dict[str, list[dict[str, Any]]]:
    seconds = {
        name: operator_seconds(mode, bench.batches[name]) for name, mode in bench.modes.items()
    }
    return {
        name: [
            {"operator": operator, "seconds_more": more, "seconds": total}
            for operator, more, total in left_over(seconds[name], seconds[NON_PRIVATE])
        ]
        for name in seconds
        if name != NON_PRIVATE
    }
