"""What a process takes of the memory, and whether an allocation failed."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress

import torch


def status(field: str, process: int | None = None) -> int | None:
    """Return a size of /proc/PID/status in bytes; None where there is none."""
    path = f"/proc/{'self' if process is None else process}/status"
    with suppress(OSError), open(path, encoding="ascii", errors="replace") as lines:
        for line in lines:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return None


def lifetime_peak() -> int:
    """Return the largest resident size of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on the device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # torch on the CPU, CUDA, cuBLAS and cuDNN
    signs = ("can't allocate memory", "not enough memory", "out of memory", "alloc_failed")
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs)
