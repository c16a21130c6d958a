"""Measure a private step on several processes, beside stock DDP and FSDP2 on equal work.

Each way runs in processes of its own, which take turns between the stock step and ours as all modes
do (:mod:`hf_dp.benchmarks.rounds`). A step begins when all processes are there, and takes as long
as in the slowest. On CPUs the seconds of computing of all processes are counted, too: on a busy
machine they say more than those on the clock, since each exchange waits for whoever is interrupted.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import patch_environment
from torch import multiprocessing

from hf_dp import _validate
from hf_dp.benchmarks.allocator import keep_freed_memory
from hf_dp.benchmarks.environment import environment
from hf_dp.benchmarks.process_modes import (
    WAYS,
    Done,
    PrivateStep,
    Step,
    StockStep,
    make_optimizer,
    spread,
)
from hf_dp.benchmarks.rounds import enough_repeats, seconds_of_step, speed
from hf_dp.benchmarks.throughput import Log, Protocol, time_runs
from hf_dp.benchmarks.workload import Batch, Workload, build_model, make_batch, threads_of
from hf_dp.errors import HfDpError

PRIVATE = "private_"  # and the way


def measure_processes(
    workload: Workload,
    processes: int,
    ways: Sequence[str] = (),
    physical_batches: int = 2,
    protocol: Protocol | None = None,
    log: Log | None = None,
) -> dict[str, Any]:
    """Time the stock step and ours in each way.

    Args:
        workload: of one process; its batch size is that of a physical batch.
        processes: at least 2, on CUDA at most one for each device.
        ways: keys of :data:`hf_dp.benchmarks.process_modes.WAYS`; none for all.
        physical_batches: of each process in a step.
        log: called with progress, in another process: a function of a module.

    Returns: what ``--json`` writes.
    Raises: InvalidArgumentError; HfDpError when a process failed, or did not do the work.
    """
    protocol = protocol or Protocol()
    processes = _validate.integer("processes", processes, 2)
    physical_batches = _validate.integer("physical_batches", physical_batches, 1)
    ways = list(dict.fromkeys(_validate.one_of("modes", way, WAYS) for way in ways or WAYS))
    if workload.on_cuda and processes > torch.cuda.device_count():
        raise _validate.invalid(
            "processes",
            processes,
            f"to be at most the {torch.cuda.device_count()} CUDA devices that torch finds",
            "Use fewer, or device 'cpu'.",
        )
    if protocol.profile or protocol.max_batch:
        raise _validate.invalid(
            "processes", processes, "to be 1 with --profile or --max-batch", "Leave those out."
        )
    machine = environment(workload)
    found = {
        way: _in_processes(processes, workload, way, physical_batches, protocol, log)
        for way in ways
    }
    examples = processes * physical_batches * workload.examples
    return {
        "benchmark": "throughput",
        "environment": machine | {"load_average_after": environment(workload)["load_average"]},
        "workload": workload.to_dict(),
        "protocol": {
            **vars(protocol),
            "repeats": {way: each["repeats"] for way, each in found.items()},
        },
        "processes": {"count": processes, "physical_batches": physical_batches},
        "modes": {
            name: speed(each["runs"], name, way, examples) | _computing(each, name, way)
            for way, each in found.items()
            for name in (way, PRIVATE + way)
        },
        "ways": {way: WAYS[way] for way in ways},
        "runs": {way: each["runs"] for way, each in found.items()},
    }


def _computing(found: dict[str, Any], name: str, baseline: str) -> dict[str, Any]:
    """Return the median seconds of computing of a step, and the ratio of the baseline's to them."""
    seconds = {each: statistics.median(times) for each, times in found["cpu_seconds"].items()}
    return {"cpu_seconds": seconds[name], "cpu_ratio": seconds[baseline] / seconds[name]}


def _in_processes(
    count: int,
    workload: Workload,
    way: str,
    physical_batches: int,
    protocol: Protocol,
    log: Log | None,
) -> dict[str, Any]:
    """Return what the first of ``count`` new processes found. Raises: HfDpError."""
    with (
        tempfile.TemporaryDirectory() as folder,
        patch_environment(omp_num_threads=str(workload.threads)),
    ):
        try:
            multiprocessing.spawn(
                _run_rank,
                (count, folder, (workload, way, physical_batches, protocol), log),
                nprocs=count,
            )
        except (
            multiprocessing.ProcessRaisedException,
            multiprocessing.ProcessExitedException,
        ) as failed:
            raise HfDpError(
                f"A process of the benchmark of {way!r} failed: {str(failed).strip()}"
            ) from failed
        answer: dict[str, Any] = json.loads(Path(folder, "answer").read_text(encoding="utf-8"))
        return answer


def _run_rank(
    rank: int,
    count: int,
    folder: str,
    request: tuple[Workload, str, int, Protocol],
    log: Log | None,
) -> None:
    """Be one of ``count`` processes; the first writes what it found to ``folder``."""
    workload = request[0]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    if workload.on_cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if workload.on_cuda else "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=count,
    )
    try:
        answer = measure_here(*request, (rank == 0 and log) or _silent)
        if rank == 0:
            Path(folder, "answer").write_text(json.dumps(answer), encoding="utf-8")
    finally:
        dist.destroy_process_group()


def _silent(line: str) -> None:
    pass


def measure_here(
    workload: Workload, way: str, physical_batches: int, protocol: Protocol, log: Log = _silent
) -> dict[str, Any]:
    """Time one way in this process, together with all others of ``torch.distributed``.

    Returns: ``repeats``, the steps in a round; ``runs``; ``cpu_seconds`` of all processes by step.
        The same in every process.
    Raises: HfDpError for a step that did not do the work.
    """
    if not workload.on_cuda:
        keep_freed_memory()
    examples = physical_batches * workload.examples
    with threads_of(workload), tempfile.TemporaryDirectory() as folder:
        log(f"preparing {way}")
        model = spread(build_model(workload), way)
        inner = getattr(model, "module", model)  # DDP's; FSDP2 changes the model itself
        optimizer = make_optimizer(inner)
        private = PrivateStep(inner, workload, optimizer, folder, dist.get_world_size() * examples)
        batches = _batches(workload, inner, physical_batches)
        done = Done.watching(inner, optimizer)
        steps: dict[str, Step] = {
            way: StockStep(model, workload, optimizer, way),
            PRIVATE + way: private,
        }
        expected = Done(physical_batches, examples, 1)
        cpu_seconds: dict[str, list[float]] = {name: [] for name in steps}
        timers = {
            name: partial(_time, name, step, batches, done, expected, cpu_seconds[name])
            for name, step in steps.items()
        }
        first = {name: timer() for name, timer in timers.items()}
        repeats = protocol.repeats or enough_repeats(first[way])
        runs = time_runs(timers, protocol, repeats, log)
        private.run.stop()
    # Without the first steps, which make buffers and the optimizer's state.
    computed = {name: each[1:] for name, each in cpu_seconds.items()}
    return {"repeats": repeats, "runs": runs, "cpu_seconds": computed}


def _batches(workload: Workload, model: torch.nn.Module, count: int) -> list[Batch]:
    """Return this process's physical batches."""
    size = workload.examples
    everyone = make_batch(workload, model, dist.get_world_size() * count * size)
    first = dist.get_rank() * count
    return [
        {name: value[at * size : (at + 1) * size] for name, value in everyone.items()}
        for at in range(first, first + count)
    ]


def _time(
    name: str,
    step: Step,
    batches: Sequence[Batch],
    done: Done,
    expected: Done,
    cpu_seconds: list[float],
) -> float:
    """Return the seconds of one step in the slowest process; note those of computing in all.

    Raises: HfDpError when this process did other work than was asked for.
    """
    gc.collect()  # before all begin together
    dist.barrier()
    before = time.process_time()
    slowest = torch.tensor(seconds_of_step(step, batches), device=step.workload.device)
    computed = torch.tensor(time.process_time() - before, device=step.workload.device)
    found = done.take()
    if found != expected:
        raise HfDpError(
            f"The step {name} did {found}, where {expected} was asked for, so its time cannot be "
            "compared."
        )
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(computed)
    cpu_seconds.append(float(computed))
    return float(slowest)
