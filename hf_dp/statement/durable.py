"""Files of evidence: replaced in one step, so that neither a kill nor a power cut leaves half of
one, and read strictly."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn


def replace_file(path: Path, chunks: Iterable[bytes]) -> None:
    """Put ``chunks`` in the place of the file at ``path``; on return they are on the disk.

    After a kill at any point the file is the old one or the new one, whole. The order ensures that:
    file to disk, rename, folder to disk.

    Raises: OSError when the disk refuses. The old file is then intact.
    """
    temporary = path.with_name(f"_{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as stream:
            for chunk in chunks:
                stream.write(chunk)
            stream.flush()
            os.fsync(stream.fileno())
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` durable, where the system can (POSIX)."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make all files and folders below ``folder``, and ``folder`` itself, durable.

    Raises: OSError when the disk refuses.
    """
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            flags = os.O_RDONLY if hasattr(os, "O_DIRECTORY") else os.O_RDWR  # (Windows)
            descriptor = os.open(os.path.join(parent, name), flags)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(parent))


def loads(text: str) -> Any:
    """Parse JSON that is evidence, and refuse what hf_dp cannot have written.

    Raises: ValueError or RecursionError for incomplete JSON, for a key that appears twice, and for
        numbers that are not finite.
    """
    return json.loads(
        text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_no_duplicates
    )


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that hf_dp writes")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_constant(text)


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a key appears twice among {[key for key, _ in pairs]}")
    return found
