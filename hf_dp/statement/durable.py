"""Files of evidence: replaced in one step, so that neither a kill nor a power cut leaves half of
one, read strictly, and known by their digests.

A digest shows that something was changed, not who changed it: whoever rewrites a file can write new
digests as well. Who that is, hf_dp does not check.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from hf_dp._dataclasses import Kept
from hf_dp.errors import LedgerError


def replace_file(path: Path, chunks: Iterable[bytes]) -> None:
    """Put ``chunks`` in the place of the file at ``path``, whole or not at all, durably.

    The order ensures that: file to disk, rename, folder to disk.

    Raises: OSError; the old file is then intact.
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
    """Make all files and folders below ``folder``, and ``folder`` itself, durable."""
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
    """Parse JSON that is evidence.

    Raises: ValueError or RecursionError for what hf_dp cannot have written: incomplete JSON, a key
        that appears twice, numbers that are not finite.
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


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What lies beside a ``privacy.json``: what the card says that does not follow from the
    statement, the digest of its title and section "Privacy" (None without a card), and by name
    those of weights and of what makes them a model."""

    card: Mapping[str, object] | None = None
    privacy_section: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Head(Kept):
    """How far the ledger of a run has come: how many lines, and the digest of the last, empty
    before the first.

    Raises: LedgerError for what is no head.
    """

    run_id: str
    lines: int = 0
    digest: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.run_id, str) or not self.run_id:
            raise LedgerError(f"Expected a run_id, got {self!r}.")
        if type(self.lines) is not int or self.lines < 0:
            raise LedgerError(f"Expected a number of lines, got {self!r}.")
        if not (is_digest(self.digest) if self.lines else self.digest == ""):
            raise LedgerError(f"Expected the SHA-256 of line {self.lines}, got {self.digest!r}.")


def is_digest(value: object) -> bool:
    """Return whether a value is a SHA-256 in hexadecimal."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def digest_of(value: object) -> str:
    """Return the digest of plain data, whatever its order of keys or spacing in a file."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of_text(text: str) -> str:
    """Return the digest of a text. How its lines end, and space before that, do not count."""
    lines = [line.rstrip(" \t\r") for line in text.strip().split("\n")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def digest_of_file(path: Path) -> str:
    """Return the digest of a file's bytes. Raises: OSError."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
