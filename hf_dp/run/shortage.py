"""Say clearly what could not be written, and that memory ran out, and what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from safetensors import SafetensorError

from hf_dp.errors import MemoryShortError, OutputError


@contextmanager
def named_disk_errors(what: str, folder: str | os.PathLike[str], next_move: str) -> Iterator[None]:
    """Raise OutputError for a file that cannot be written inside the ``with``.

    Args: what: is being written. folder: where. next_move: what to do, besides making room.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        of_torch = any(name in str(error) for name in ("PytorchStreamWriter", "inline_container"))
        if isinstance(error, RuntimeError) and not of_torch:  # torch.save has no error class
            raise
        cause = error.__cause__ if isinstance(error, OutputError) else error  # said more exactly
        why = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
        raise OutputError(
            f"{what} could not be written to {os.fspath(folder)!r} ({why}). Make room, or make the "
            f"folder writable. {next_move}"
        ) from error


@contextmanager
def named_memory_errors() -> Iterator[None]:
    """Raise MemoryShortError when memory runs out inside the ``with``, before anything is recorded
    or released."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryShortError(
            "Memory ran out while a logical batch was computed. Its step is neither recorded nor "
            "released, and costs nothing. Set `auto_physical_batch_size=True` (on a GPU), or lower "
            "`per_device_train_batch_size` or set `max_tokens_per_physical_batch`: all change "
            "memory and speed, never the result. Then go on with resume_from_checkpoint=True."
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on the device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # torch on the CPU, CUDA, cuBLAS and cuDNN
    signs = ("can't allocate memory", "not enough memory", "out of memory", "alloc_failed")
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in signs)
