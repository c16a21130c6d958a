"""Measure the peak memory of every mode, each in a fresh process: in one, a mode would inherit what
the allocator kept for another. The process is ``python -m hf_dp.benchmarks.memory REQUEST``.

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
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from hf_dp import _validate
from hf_dp.benchmarks import modes
from hf_dp.benchmarks.modes import FORWARD, NON_PRIVATE, Refused, Report, Row
from hf_dp.benchmarks.workload import Batch, Workload, environment, make_batch
from hf_dp.errors import HfDpError

MIB = 2**20

# What is freed goes back to the system at once, so that resident memory is memory in use. Otherwise
# glibc keeps freed tensors and MKL its buffers, and the peak depends on the order of allocations.
_ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
    "MKL_DISABLE_FAST_MM": "1",
    "HF_HUB_OFFLINE": "1",
}


def _resident(field: str) -> int:
    """Return a size of /proc/self/status in bytes; without it, the largest resident size so far."""
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as lines:
        for line in lines:
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes


def probe(workload: Workload, mode: str, steps: int) -> Row:
    """Measure one mode in a new process, by :func:`measure_here`."""
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
    answer: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def measure_memory(
    workload: Workload,
    names: Sequence[str],
    steps: int = 3,
    log: Callable[[str], None] = lambda line: None,
) -> Report:
    """Return the peak of each mode from its second step on, and its ratio to non-private."""
    _validate.integer("steps", steps, 2)
    rows: dict[str, Row] = {}
    for name in modes.check_modes(names):
        log(name)
        rows[name] = probe(workload, name, steps)
        modes.refuse_without_yardstick(workload, rows[NON_PRIVATE])
        if "refused" not in rows[name]:
            rows[name]["mebibytes"] = rows[name].pop("bytes") / MIB
            rows[name]["ratio"] = rows[name]["mebibytes"] / rows[NON_PRIVATE]["mebibytes"]
    return {
        "benchmark": "memory",
        "environment": environment(workload),
        "workload": vars(workload),
        "protocol": {"steps": steps},
        "modes": rows,
    }


def measure_here(workload: Workload, name: str, steps: int) -> Row:
    """Return, in the new process, the peak bytes above what was in use before the model was built,
    how they were measured, and the mode's note; or why it was refused."""
    torch.set_num_threads(workload.threads or 1)
    # A first step loads libraries and kernels. DP-FP needs a classifier.
    tiny = "tiny-bert" if name == FORWARD else "tiny"
    with suppress(Refused):
        first_step(name, replace(workload, model=tiny, per_device_train_batch_size=2, max_length=8))
    cuda = workload.device == "cuda"
    before = torch.cuda.memory_allocated() if cuda else _resident("VmRSS")
    measured = "peak resident size, model building and first step included"
    try:
        mode, batch = first_step(name, workload)
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            measured = "torch.cuda.max_memory_allocated from the second step on"
        else:
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")
                measured = "peak resident size from the second step on"
        with modes.refusals(name):
            for _ in range(steps - 1):
                mode.step(batch)
    except Refused as refused:
        return {"refused": str(refused)}
    peak = torch.cuda.max_memory_allocated() if cuda else _resident("VmHWM")
    return {"bytes": max(0, peak - before), "measured": measured, "note": mode.note}


def first_step(name: str, workload: Workload) -> tuple[modes.NonPrivate, Batch]:
    """Return a mode with a model of its own, and the batch of which it has made a step."""
    with modes.refusals(name):
        mode = modes.build_mode(name, workload)
        batch = make_batch(workload, mode.model)
        mode.step(batch)
        return mode, batch


if __name__ == "__main__":
    work, *rest = json.loads(sys.argv[1])
    sys.stdout.write("\n" + json.dumps(measure_here(Workload(**work), *rest)) + "\n")
