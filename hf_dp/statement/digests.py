"""Digests in ``privacy.json``: which plan, ledger, weights and card belong together.

A digest shows that something was changed, not who changed it: whoever rewrites a file can write new
digests as well. Who that is, hf_dp does not check.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hf_dp._dataclasses import checked_fields
from hf_dp.errors import LedgerError

# The parts of privacy.json itself that have a digest.
PARTS = ("plan", "ledger", "statement", "card")
OF_THE_README = ("privacy_section", "differential_privacy")


@dataclass(frozen=True)
class Beside:
    """What lies beside a ``privacy.json``.

    Args:
        card: what the card says that does not follow from the statement, as plain data; None
            without a card.
        digests: of what :data:`OF_THE_README` names; empty without a card.
        files: digests by name, as :attr:`Digests.files`.
    """

    card: Mapping[str, Any] | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Digests:
    """SHA-256 digests, in hexadecimal, of what a card and its evidence are made of.

    Args:
        plan, ledger, statement, card: of these parts of the same ``privacy.json``, as canonical
            JSON.
        privacy_section: of the section "Privacy" of README.md; None without a card.
        differential_privacy: of the value of this key in the metadata of README.md; likewise.
        files: by name, of each file beside it that holds weights or what was chosen to train.

    Raises: LedgerError for what is no digest.
    """

    plan: str
    ledger: str
    statement: str
    card: str
    privacy_section: str | None = None
    differential_privacy: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.files, Mapping):
            raise LedgerError(f"Expected digests of files by name, got {self.files!r}.")
        object.__setattr__(self, "files", dict(self.files))
        single = {item.name: getattr(self, item.name) for item in fields(self)[:-1]}
        for name, digest in {**single, **self.files}.items():
            if digest is None and name in OF_THE_README:
                continue
            if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
                raise LedgerError(f"Expected the SHA-256 of {name!r}, got {digest!r}.")

    @classmethod
    def of(cls, document: Mapping[str, Any], beside: Beside) -> Digests:
        """Return the digests of a document and of what lies beside it."""
        parts = {name: digest_of(document[name]) for name in PARTS}
        return cls(**parts, **beside.digests, files=beside.files)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, JSON-ready; :meth:`from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> Digests:
        """Read back what :meth:`to_dict` wrote.

        Raises: LedgerError for unknown, missing or bad fields.
        """
        return cls(**checked_fields(cls, values, LedgerError))

    def changed_parts(self, document: Mapping[str, Any]) -> list[str]:
        """List the parts of a ``privacy.json`` that are not what they were when it was written."""
        return [name for name in PARTS if digest_of(document[name]) != getattr(self, name)]


@dataclass(frozen=True)
class Head:
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
        fits = isinstance(self.lines, int) and not isinstance(self.lines, bool) and self.lines >= 0
        if not isinstance(self.run_id, str) or not self.run_id or not fits:
            raise LedgerError(f"Expected a run_id and a number of lines, got {self!r}.")
        if not isinstance(self.digest, str) or not re.fullmatch(
            "[0-9a-f]{64}" if self.lines else "", self.digest
        ):
            raise LedgerError(f"Expected the SHA-256 of line {self.lines}, got {self.digest!r}.")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, JSON-ready; :meth:`from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> Head:
        """Read back what :meth:`to_dict` wrote.

        Raises: LedgerError for unknown, missing or bad fields.
        """
        return cls(**checked_fields(cls, values, LedgerError))


def digest_of(value: Any) -> str:
    """Return the digest of plain data, whatever its order of keys or spacing in a file."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of_text(text: str) -> str:
    """Return the digest of a text. How its lines end, and space before that, do not count."""
    lines = [line.rstrip(" \t\r") for line in text.strip().split("\n")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def digest_of_bytes(content: bytes) -> str:
    """Return the digest of bytes."""
    return hashlib.sha256(content).hexdigest()


def digest_of_file(path: Path) -> str:
    """Return the digest of a file's bytes. Raises: OSError."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
