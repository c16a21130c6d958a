"""Measure the peak memory of one mode in this process.

Usage: ``python -m hf_dp.benchmarks.memory_probe REQUEST``. REQUEST is JSON: ``workload`` (fields of
Workload), ``mode``, ``steps``. One JSON line on stdout answers, see
:func:`hf_dp.benchmarks.memory.probe`.

On the CPU, the resident size is measured. A tiny model trains first in the same mode, so that
libraries that load on first use are loaded; what is resident then is subtracted. The kernel's
high-water mark is reset after the first step of the measured model where the system allows it
(writing 5 to /proc/self/clear_refs, see proc(5)), so that neither building the model nor first-use
buffers set the peak. Otherwise the mark of the whole process counts. On CUDA, the allocator's own
peak is measured and reset likewise.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Any

import torch

from hf_dp.benchmarks.mode import Refused
from hf_dp.benchmarks.modes import FORWARD, build_mode, refusals
from hf_dp.benchmarks.workload import Workload, make_batch
from hf_dp.run.memory import lifetime_peak, status


def measure(workload: Workload, name: str, steps: int) -> dict[str, Any]:
    """Return the peak bytes of steps 2 to ``steps``, and how they were measured.

    What was in use before the model was built is subtracted.
    """
    torch.set_num_threads(workload.threads or 1)
    # A first step loads libraries and kernels. DP-FP needs a classifier, and "tiny" is a language
    # model.
    small = "tiny-bert" if name == FORWARD else "tiny"
    with suppress(Refused):
        _train(workload.replace(model=small, batch_size=2, length=8), name, 1)
    meter = CudaMeter() if workload.on_cuda else ResidentMeter()
    try:
        note = _train(workload, name, steps, meter)
    except Refused as refused:
        return {"refused": str(refused)}
    return {"bytes": meter.peak(), "measured": meter.measured, "note": note}


def _train(
    workload: Workload, name: str, steps: int, meter: CudaMeter | ResidentMeter | None = None
) -> str:
    """Train a new model for some steps and return the mode's note.

    The meter starts after the first step.
    """
    with refusals(name):
        mode = build_mode(name, workload)
        batch = make_batch(workload, mode.model)
        mode.step([batch])
        if meter is not None:
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


def main() -> None:
    """Answer the request on the command line."""
    request = json.loads(sys.argv[1])
    answer = measure(Workload(**request["workload"]), request["mode"], request["steps"])
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
