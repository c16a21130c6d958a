"""A high-water mark: how far the ledger of a run has come, written beside it and never taken back.

``privacy.json`` can be replaced by an older copy of itself. The mark does not go back along with it
by accident: the run's own mark has another name than its copies, which travel with checkpoints and
weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_dp.accounting import Ledger
from hf_dp.errors import LedgerError
from hf_dp.run.weights_file import add_metadata, read_metadata
from hf_dp.statement.durable import replace_file
from hf_dp.statement.record import PrivacyRecord
from hf_dp.statement.strict_json import loads
from hf_dp.statement.weaknesses import Weaknesses

# Names that start with "_" are never pushed to the Hub. The run's own mark must not have the name
# of its copies: otherwise copying a checkpoint over the run would set both files back.
RUN_MARK = "_privacy_mark.json"  # in the run's folder
COPIED_MARK = "_privacy_mark_of_copy.json"  # in checkpoints, and wherever else weights are saved
VERSION = 1
STAMP_PREFIX = "hf_dp_"  # of the keys in the metadata of weights


@dataclass(frozen=True, eq=False)
class Mark:
    """What a run had released, and what had weakened it, when the mark was made."""

    run_id: str
    ledger: Ledger
    weaknesses: Weaknesses

    @classmethod
    def of(cls, record: PrivacyRecord) -> Mark:
        """Make the mark that belongs to a ``privacy.json``."""
        return cls(record.run_id, record.ledger, record.weaknesses)

    def extends(self, other: Mark) -> bool:
        """Return whether this is the same run, at the same point or later."""
        return self.run_id == other.run_id and not self.lacks(other)

    def lacks(self, other: Mark) -> str:
        """Say what ``other`` knows of the same run and this mark does not; empty if nothing."""
        if not self.ledger.extends(other.ledger):
            return f"{in_words(other.ledger)}, which {in_words(self.ledger)} here do not continue"
        if not self.weaknesses.includes(other.weaknesses):
            return f"{other.weaknesses} as what weakens the run, against {self.weaknesses} here"
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Give plain data, JSON-ready; :meth:`from_dict` reads it back."""
        return {
            "mark_version": VERSION,
            "run_id": self.run_id,
            "ledger": self.ledger.to_list(),
            "weaknesses": self.weaknesses.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: Any, where: Path) -> Mark:
        """Read back what :meth:`to_dict` wrote. Raises: LedgerError naming the file ``where``."""
        if (
            isinstance(values, Mapping)
            and isinstance(version := values.get("mark_version"), int)
            and version > VERSION
        ):
            raise LedgerError(
                f"The mark in {where} has version {version}; this hf_dp knows versions up to "
                f"{VERSION}. Upgrade hf_dp and try again."
            )
        keys = ["mark_version", "run_id", "ledger", "weaknesses"]
        if (
            not isinstance(values, Mapping)
            or set(values) != set(keys)
            or values["mark_version"] != VERSION
        ):
            raise _edited(
                where,
                f"expected the keys {keys}, got "
                f"{list(values) if isinstance(values, Mapping) else values!r}",
            )
        if not isinstance(values["run_id"], str) or not values["run_id"]:
            raise _edited(where, f"expected a run_id, got {values['run_id']!r}")
        try:
            ledger = Ledger.from_list(values["ledger"])
            return cls(values["run_id"], ledger, Weaknesses.from_dict(values["weaknesses"]))
        except LedgerError as error:
            raise _edited(where, str(error)) from error


def in_words(ledger: Ledger) -> str:
    """Count the releases in a ledger by purpose, in words."""
    counts = {entry.purpose: ledger.steps(entry.purpose) for entry in ledger.entries}
    return (
        " and ".join(f"{steps} of {purpose}" for purpose, steps in counts.items()) or "no releases"
    )


def write_mark(path: Path, mark: Mark) -> None:
    """Make ``mark`` durable in a file of its own, unless it is there already.

    Raises:
        LedgerError: the file there is of another run, knows more, or cannot be read. It is left
            as it is.
        OSError: the disk refused.
    """
    if path.exists():
        there = read_mark(path)
        _refuse_to_lose(there, mark, path)
        if there.extends(mark):
            return
    replace_file(path, [json.dumps(mark.to_dict(), allow_nan=False).encode(), b"\n"])


def read_mark(path: Path) -> Mark:
    """Return the mark in a file of its own.

    Raises: LedgerError for a damaged, edited or newer file.
    """
    try:
        return Mark.from_dict(loads(path.read_text(encoding="utf-8")), path)
    except (OSError, ValueError, RecursionError) as error:
        raise _edited(path, str(error)) from error


def stamp(path: Path, mark: Mark) -> None:
    """Put ``mark`` into the metadata of a weights file.

    Raises: LedgerError when the file carries the mark of another run, or one that knows more.
    """
    there = read_stamp(path)
    if there is not None:
        _refuse_to_lose(there, mark, path)
        if there.extends(mark):
            return
    values = mark.to_dict()
    texts = {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()
    }
    add_metadata(path, {STAMP_PREFIX + key: text for key, text in texts.items()})


def read_stamp(path: Path) -> Mark | None:
    """Return the mark in the metadata of a weights file, or None. Raises: LedgerError."""
    found = read_metadata(path)
    texts = {
        key.removeprefix(STAMP_PREFIX): text
        for key, text in found.items()
        if key.startswith(STAMP_PREFIX)
    }
    if not texts:
        return None
    try:
        return Mark.from_dict(
            {key: text if key == "run_id" else loads(text) for key, text in texts.items()}, path
        )
    except (ValueError, RecursionError) as error:
        raise _edited(path, str(error)) from error


def _refuse_to_lose(there: Mark, new: Mark, path: Path) -> None:
    if there.run_id != new.run_id:
        raise LedgerError(
            f"{path} carries the mark of run {there.run_id}, and this is run {new.run_id}. The "
            "steps of that run would be forgotten. Save into another folder."
        )
    if lost := new.lacks(there):
        raise LedgerError(
            f"{path} knows {lost}: the ledger of this run went back. Resume from the run's own "
            "ledger, or save into another folder."
        )


def _edited(where: Path, why: str) -> LedgerError:
    return LedgerError(
        f"The mark in {where} was edited or damaged ({why}). Restore it from a backup that is not "
        "older: without it nobody knows whether the ledger of this run went back."
    )
