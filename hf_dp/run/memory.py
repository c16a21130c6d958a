"""What a process may take of the memory, and what a step takes of it.

On the CPU a step is tried in a child process, forked from this one, which is killed when it takes
too much; on a GPU an allocation that fails is caught here.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil
import torch

_LOOK = 0.005  # seconds between two looks at what a child has taken
_FITTED, _FAILED, _OUT_OF_MEMORY = 0, 1, 2  # exit statuses of a child


@dataclass(frozen=True)
class Tried:
    """What came of a step that was tried.

    Attributes:
        bytes: its peak, above what was in use before; None where it did not come to its end.
        ended: how it ended, in words, where it ran out of memory.
        error: what it raised otherwise.
    """

    bytes: int | None = None
    ended: str = ""
    error: str = ""


# -- what there is --


def left_by_others(device: torch.device, share: int = 1) -> int:
    """Return the bytes that other programs leave on a device: free, or held by this process.

    What this process holds counts as free, so the answer does not depend on what that is.

    Args: share: how many processes like this one share the memory; each gets an equal part.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    free = psutil.virtual_memory().available
    return min(free, _left_in_groups()) // share + taken()


def taken(process: int | None = None) -> int:
    """Return the bytes that a process (None: this one) holds and cannot give back: on Linux without
    pages of files, elsewhere its resident size."""
    anonymous = status("RssAnon", process)
    if anonymous is None:
        return int(psutil.Process(process).memory_info().rss)
    return anonymous + (status("RssShmem", process) or 0)


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
    return _in_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on the device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # torch on the CPU, CUDA, cuBLAS and cuDNN
    signs = ("can't allocate memory", "not enough memory", "out of memory", "alloc_failed")
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs)


def _left_in_groups() -> int:
    """Return what the control groups of this process, and those above them, leave (Linux)."""
    left = sys.maxsize
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # version 2
                root, names = "/sys/fs/cgroup", ("memory.max", "memory.current", "")
            elif "memory" in controllers.split(","):
                root = "/sys/fs/cgroup/memory"
                names = (
                    "memory.limit_in_bytes",
                    "memory.usage_in_bytes",
                    "total_",
                )
            else:
                continue
            group = Path(root, path.lstrip("/"))
            for folder in (group, *group.parents):
                if folder.is_relative_to(root):
                    left = min(left, _left_in(folder, *names))
    return left


def _left_in(folder: Path, most: str, used: str, prefix: str) -> int:
    """Return what one control group leaves; what the kernel caches of files it gives back, also
    what was read twice (a data set's pages become active)."""
    files = {f"{prefix}inactive_file", f"{prefix}active_file"}
    with suppress(OSError, ValueError):
        limit = int((folder / most).read_text(encoding="ascii"))  # version 2 says "max" for none
        now = int((folder / used).read_text(encoding="ascii"))
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        cached = sum(int(line.split()[1]) for line in lines if line.split()[0] in files)
        return max(0, limit - now + cached)
    return sys.maxsize


def _in_bytes(resident: int) -> int:
    return resident if sys.platform == "darwin" else resident * 1024  # macOS counts bytes


# -- trying --


def try_on(device: torch.device, step: Callable[[], None], most: int) -> Tried:
    """Run ``step()`` and return what it took of the memory; on the CPU in a child process, which is
    killed when it takes more than ``most`` bytes."""
    return _try_here(device, step) if device.type == "cuda" else _try_in_a_child(step, most)


def _try_here(device: torch.device, step: Callable[[], None]) -> Tried:
    _free()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    try:
        step()
        torch.cuda.synchronize(device)
        return Tried(torch.cuda.max_memory_reserved(device) - before)
    except Exception as problem:
        if is_out_of_memory(problem):
            return Tried(ended=str(problem).partition(".")[0])
        return Tried(error=f"{type(problem).__name__}: {problem}")
    finally:
        _free()


def _free() -> None:
    gc.collect()  # a failed step leaves cycles of frames, which hold its tensors
    torch.cuda.empty_cache()


def _try_in_a_child(step: Callable[[], None], most: int) -> Tried:
    with suppress(AttributeError, OSError, TypeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)  # so that a child finds nothing to take unnoticed
    reading, writing = os.pipe()
    before = taken()
    with warnings.catch_warnings():
        # Python warns of threads, which do not live on in the child; it runs in one thread.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(reading)
        _run_as_child(step, writing)
    os.close(writing)
    done, killed = 0, False
    try:
        while not done:
            done, ended, used = os.wait4(child, os.WNOHANG)
            with suppress(psutil.Error):  # it ended since
                if not done and not killed and taken(child) - before > most:
                    os.kill(child, signal.SIGKILL)
                    killed = True
            time.sleep(_LOOK)
    finally:
        if not done:  # interrupted
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        with open(reading, "rb") as pipe:
            said = pipe.read().decode(errors="replace")
    exit_status = os.waitstatus_to_exitcode(ended)
    if killed:
        return Tried(ended="it took too much and was killed")
    if exit_status < 0:
        return Tried(ended=f"signal {-exit_status} ended it (9: the system ran out of memory)")
    if exit_status == _FITTED:
        return Tried(max(0, _in_bytes(used.ru_maxrss) - int(said) - before))
    return Tried(ended=said) if exit_status == _OUT_OF_MEMORY else Tried(error=said)


def _run_as_child(step: Callable[[], None], writing: int) -> NoReturn:
    """Run the step and end this process. Says how many bytes of its resident size are pages of
    files, or what went wrong."""
    outcome, said = _FAILED, ""
    try:
        with suppress(OSError):  # the system, too, shall end this process and not its parent
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
        torch.set_num_threads(1)  # OpenMP's threads do not live on in a child
        step()
        outcome, said = _FITTED, str(status("RssFile") or 0)
    except BaseException as problem:
        outcome = _OUT_OF_MEMORY if is_out_of_memory(problem) else _FAILED
        said = f"{type(problem).__name__}: {problem}"[:2000]
    finally:
        with suppress(OSError):
            os.write(writing, said.encode())
        os._exit(outcome)
