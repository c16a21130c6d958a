"""Measure the peak memory of every mode, each in a fresh process.

In one process, a mode would inherit what the allocator kept for another. The process is this
module: ``python -m hf_dp.benchmarks.memory REQUEST`` answers :func:`probe`.

On the CPU, the resident size is measured. A tiny model trains first in the same mode, so that
libraries that load on first use are loaded; what is resident then is subtracted. The kernel's
high-water mark is reset after the first step of the measured model where the system allows it
(writing 5 to /proc/self/clear_refs, see proc(5)), so that neither building the model nor first-use
buffers set the peak. Otherwise the mark of the whole process counts. On CUDA, the allocator's own
peak is measured and reset likewise.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from hf_dp import _validate
from hf_dp.benchmarks.modes import (
    FORWARD,
    NON_PRIVATE,
    Refused,
    build_mode,
    check_modes,
    refusals,
    without_yardstick,
)
from hf_dp.benchmarks.workload import Workload, environment, make_batch
from hf_dp.errors import HfDpError

MIB = 2**20
Probe = Callable[[Workload, str, int], dict[str, Any]]

# These are the same for every mode. What is freed goes back to the system at once, so that resident
# memory is memory in use. Otherwise glibc keeps freed tensors in its arenas and MKL its scratch
# buffers, and the peak depends on the order of allocations.
_ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
    "MKL_DISABLE_FAST_MM": "1",
    "HF_HUB_OFFLINE": "1",
}


def status(field: str) -> int | None:
    """Return a size of /proc/self/status in bytes; None where there is none."""
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as lines:
        for line in lines:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return None


def lifetime_peak() -> int:
    """Return the largest resident size of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes


def probe(workload: Workload, mode: str, steps: int) -> dict[str, Any]:
    """Measure one mode in a new process.

    Returns: what :func:`measure_here` does, or ``{"refused": reason}``.
    Raises: HfDpError with the last line of its output when the process failed.
    """
    request = json.dumps([vars(workload), mode, steps])
    done = subprocess.run(
        [sys.executable, "-m", "hf_dp.benchmarks.memory", request],
        env={**os.environ, **_ALLOCATOR, "OMP_NUM_THREADS": str(workload.threads)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode < 0:
        signal = -done.returncode
        return {"refused": f"stopped by signal {signal} (9: the system ran out of memory)"}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise HfDpError(f"The memory probe of mode {mode!r} failed: {last}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def measure_memory(
    workload: Workload,
    modes: Sequence[str],
    repeats: int = 1,
    steps: int = 3,
    run: Probe = probe,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Return the median peak of each mode over ``repeats`` processes, and its ratio to non-private.

    Args: steps: of each process; the peak is taken from the second on. run: the probe, for tests.

    Returns: what ``--json`` prints.
    Raises: InvalidArgumentError; HfDpError when non-private training cannot run.
    """
    names = check_modes(modes)
    repeats, steps = _validate.integer("repeats", repeats, 1), _validate.integer("steps", steps, 2)
    machine = environment(workload)
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(repeats):
        for name in names:
            log(f"repeat {number + 1} of {repeats}: {name}")
            answers[name].append(run(workload, name, steps))
    rows = {name: _row(each) for name, each in answers.items()}
    if "refused" in rows[NON_PRIVATE]:
        raise without_yardstick(workload, rows[NON_PRIVATE]["refused"])
    for row in rows.values():
        if "refused" not in row:
            row["ratio"] = row["mebibytes"] / rows[NON_PRIVATE]["mebibytes"]
    return {
        "benchmark": "memory",
        "environment": machine,
        "workload": vars(workload),
        "protocol": {"repeats": repeats, "steps": steps},
        "measured": answers[NON_PRIVATE][0]["measured"],
        "modes": rows,
    }


def _row(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of the peaks, or why a process had to refuse."""
    for answer in answers:
        if "refused" in answer:
            return {"refused": answer["refused"]}
    peaks = [answer["bytes"] / MIB for answer in answers]
    return {"mebibytes": statistics.median(peaks), "repeats": peaks, "note": answers[0]["note"]}


# -- in the new process --


def measure_here(workload: Workload, name: str, steps: int) -> dict[str, Any]:
    """Return the peak bytes of steps 2 to ``steps`` above what was in use before the model was
    built, how they were measured, and the mode's note."""
    torch.set_num_threads(workload.threads or 1)
    # A first step loads libraries and kernels. DP-FP needs a classifier.
    tiny = "tiny-bert" if name == FORWARD else "tiny"
    small = replace(workload, model=tiny, per_device_train_batch_size=2, max_length=8)
    with suppress(Refused):
        _train(small, name, 1, meter_of(workload.device))
    meter = meter_of(workload.device)
    try:
        note = _train(workload, name, steps, meter)
    except Refused as refused:
        return {"refused": str(refused)}
    return {"bytes": meter.peak(), "measured": meter.measured, "note": note}


def _train(workload: Workload, name: str, steps: int, meter: ResidentMeter | CudaMeter) -> str:
    """Make steps with a new model, the meter running after the first; return the mode's note."""
    with refusals(name):
        mode = build_mode(name, workload)
        batch = make_batch(workload, mode.model)
        mode.step([batch])
        meter.start()
        for _ in range(steps - 1):
            mode.step([batch])
        return mode.note


class ResidentMeter:
    """Peak resident size of this process above what it was when the meter was made, in bytes."""

    def __init__(self) -> None:
        self.before = status("VmRSS") or lifetime_peak()
        self.measured = "peak resident size, model building and first step included"

    def start(self) -> None:
        """Forget the peak so far, where the system allows it."""
        with suppress(OSError):
            with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
                file.write("5")
            self.measured = "peak resident size from the second step on"

    def peak(self) -> int:
        """Return the peak in bytes, at least 0."""
        return max(0, (status("VmHWM") or lifetime_peak()) - self.before)


class CudaMeter:
    """Peak of what torch's allocator handed out since the meter was made, in bytes."""

    measured = "torch.cuda.max_memory_allocated from the second step on"

    def __init__(self) -> None:
        self.before = torch.cuda.memory_allocated()

    def start(self) -> None:
        """Forget the peak so far."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Return the peak in bytes."""
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - self.before


def meter_of(device: str) -> ResidentMeter | CudaMeter:
    """Return the meter of a kind of device, ``cpu`` or ``cuda``."""
    return CudaMeter() if device == "cuda" else ResidentMeter()


if __name__ == "__main__":
    work, *rest = json.loads(sys.argv[1])
    sys.stdout.write("\n" + json.dumps(measure_here(Workload(**work), *rest)) + "\n")
