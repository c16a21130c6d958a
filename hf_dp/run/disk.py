"""Say clearly what could not be written, where, and what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from hf_dp.errors import OutputError


@contextmanager
def named_disk_errors(what: str, folder: str | os.PathLike[str], next_move: str) -> Iterator[None]:
    """Raise OutputError for a file that cannot be written inside the ``with``.

    torch.save and safetensors report a full disk by errors of their own.

    Args: what: is being written. folder: where. next_move: what to do, besides making room.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if not _is_of_the_disk(error):
            raise
        cause = error.__cause__ if isinstance(error, OutputError) else error  # said more exactly
        why = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
        raise OutputError(
            f"{what} could not be written to {str(Path(folder))!r} ({why}). Make room, or make the "
            f"folder writable. {next_move}"
        ) from error


def _is_of_the_disk(error: Exception) -> bool:
    if not isinstance(error, RuntimeError):
        return True
    text = str(error)  # PyTorch's writer of archives has no error class
    return "PytorchStreamWriter" in text or "inline_container" in text
