"""Digests: of what lies beside a ``privacy.json``, and of how far a ledger has come.

A digest shows that something was changed, not who changed it: whoever rewrites a file can write new
digests as well. Who that is, hf_dp does not check.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hf_dp._dataclasses import Kept
from hf_dp.errors import LedgerError


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What lies beside a ``privacy.json``.

    Args:
        card: what the card says that does not follow from the statement, as plain data; None
            without a card.
        privacy_section: the digest of the card's title and section "Privacy"; None without a card.
        files: by name, the digest of each file that holds weights or what was chosen to train.
    """

    card: Mapping[str, object] | None = None
    privacy_section: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Head(Kept):
    """How far the ledger of a run has come.

    Args:
        run_id: which run it is.
        lines: of its ledger.
        digest: of the last line; empty before the first.

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
