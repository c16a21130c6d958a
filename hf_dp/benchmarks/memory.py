"""Measure the peak memory of every mode, each in a fresh process.

In one process, a mode would inherit what the allocator kept for another.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hf_dp import _validate
from hf_dp.benchmarks.environment import environment
from hf_dp.benchmarks.modes import NON_PRIVATE, check_modes
from hf_dp.benchmarks.workload import Workload
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


def probe(workload: Workload, mode: str, steps: int) -> dict[str, Any]:
    """Run :mod:`hf_dp.benchmarks.memory_probe` in a new process.

    Returns: ``{"bytes": peak, "measured": how, "note": ...}``, or ``{"refused": reason}``.
    Raises: HfDpError with the last line of its output when the process failed.
    """
    request = json.dumps({"workload": workload.to_dict(), "mode": mode, "steps": steps})
    done = subprocess.run(
        [sys.executable, "-m", "hf_dp.benchmarks.memory_probe", request],
        env={**os.environ, **_ALLOCATOR, "OMP_NUM_THREADS": str(workload.threads)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode < 0:
        return {
            "refused": f"stopped by signal {-done.returncode} (9: the system ran out of memory)"
        }
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

    Non-private training runs with the same checkpointing.

    Args:
        steps: training steps a process; the peak is taken from the second on.
        run: the probe, for tests.
        log: called with progress.

    Returns: what ``--json`` writes.
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
    base = _median(answers[NON_PRIVATE])
    if base is None:
        raise HfDpError(
            f"Non-private training of `model` {workload.model!r} at `batch_size` "
            f"{workload.examples} cannot run: {answers[NON_PRIVATE][0].get('refused')}. Choose a "
            "smaller batch_size, length or model."
        )
    return {
        "benchmark": "memory",
        "environment": machine,
        "workload": workload.to_dict(),
        "protocol": {"repeats": repeats, "steps": steps},
        "measured": answers[NON_PRIVATE][0]["measured"],
        "modes": {name: _row(answers[name], base) for name in names},
    }


def _median(answers: Sequence[dict[str, Any]]) -> float | None:
    """Return the median of the peaks in bytes; None if any process had to refuse."""
    if any("refused" in answer for answer in answers):
        return None
    return statistics.median(answer["bytes"] for answer in answers)


def _row(answers: Sequence[dict[str, Any]], base: float) -> dict[str, Any]:
    peak = _median(answers)
    if peak is None:
        return {"refused": next(answer["refused"] for answer in answers if "refused" in answer)}
    peaks = [answer["bytes"] / MIB for answer in answers]
    return {
        "mebibytes": peak / MIB,
        "ratio": peak / base,
        "repeats": peaks,
        "note": answers[0]["note"],
    }
