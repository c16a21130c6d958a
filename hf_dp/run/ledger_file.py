"""``ledger.jsonl``: a line for each release of a run, each with the digest of the line before it.

A line is durable before the release that it records becomes visible to anyone. The head, which is
how many lines there are and the digest of the last, is durable after the line and before the
release. Heads travel: a ledger that does not contain one that anything else knows went back.
A last line that is torn was never released, and is cut.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from hf_dp.accounting import EARLIER, Ledger, LedgerEntry, event_from_dict
from hf_dp.errors import HfDpError, LedgerError
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.statement.durable import Head, loads, replace_file, sync_folder
from hf_dp.statement.evidence import Evidence
from hf_dp.statement.facts import Weaknesses

LEDGER = "ledger.jsonl"  # in the run's folder
# Names that start with "_" are never pushed to the Hub. A copy has another name than the ledger:
# otherwise copying a checkpoint over the run would set the ledger back.
HEAD = "_ledger_head.json"  # beside the ledger, and nowhere else
COPY = "_ledger_copy.jsonl"  # in checkpoints, and wherever else weights are saved
LOCK = "_privacy.lock"
_WRONG = (
    HfDpError, KeyError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip


@dataclass(eq=False)
class Lines:
    """What the lines of a ledger say: of which run, what it released (equal steps together), what
    weakens its claim, the digest of each line, and how many bytes they are."""

    run_id: str
    plan: PrivacyPlan
    ledger: Ledger = field(default_factory=Ledger)
    weaknesses: Weaknesses = field(default_factory=Weaknesses)
    digests: list[str] = field(default_factory=list)
    size: int = 0

    def __post_init__(self) -> None:
        Head(self.run_id)  # or raise

    @property
    def head(self) -> Head:
        """How far the ledger has come."""
        return Head(self.run_id, len(self.digests), self.digests[-1] if self.digests else "")

    def contains(self, head: Head) -> bool:
        """Return whether this is the ledger of that head, at the same point or later."""
        if head.run_id != self.run_id or head.lines > len(self.digests):
            return False
        return head.lines == 0 or self.digests[head.lines - 1] == head.digest

    def next(self, entries: Sequence[LedgerEntry], weaknesses: Weaknesses) -> bytes:
        """Return the next line: what is released, and what newly weakens the claim.

        Raises: LedgerError for one that could not be read back.
        """
        values: dict[str, object] = {"after": self.head.digest, **self._start()}
        if not self.weaknesses.includes(weaknesses):
            values["weaknesses"] = weaknesses.to_dict()
        rows = [{"purpose": entry.purpose, **entry.event.to_dict()} for entry in entries]
        text = json.dumps({**values, "entries": rows}, separators=(",", ":"), allow_nan=False)
        line = text.encode() + b"\n"
        try:
            self._said(line)
        except _WRONG as why:
            raise LedgerError(f"Nothing is recorded, since the line would be wrong: {why}") from why
        return line

    def take(self, line: bytes) -> None:
        """Add a line. Raises: whatever is wrong with it; nothing of it is added then."""
        entries, self.weaknesses = self._said(line)
        for entry in entries:
            self.ledger.append(entry.event, entry.purpose)
        self.digests.append(hashlib.sha256(line).hexdigest())
        self.size += len(line)

    def _said(self, line: bytes) -> tuple[list[LedgerEntry], Weaknesses]:
        """Return what a line releases, and what weakens the claim after it. Raises: as above."""
        values = loads(line.decode())
        for name, expected in {"after": self.head.digest, **self._start()}.items():
            if values.pop(name) != expected:
                raise ValueError(f"its {name!r} does not follow from the lines before it")
        known = self.weaknesses
        if "weaknesses" in values:
            known = known.merged(Weaknesses.from_dict(values.pop("weaknesses")))
        rows = [(row.pop("purpose"), event_from_dict(row)) for row in values.pop("entries")]
        entries = [LedgerEntry(event, purpose) for purpose, event in rows]
        if values:
            raise ValueError(f"expected no more keys, got {list(values)}")
        if any(entry.purpose == EARLIER for entry in entries) and not known.earlier:
            raise ValueError("it counts earlier runs but names none")
        return entries, known

    def _start(self) -> dict[str, object]:
        """Return what the first line says besides."""
        return {} if self.digests else {"run_id": self.run_id, "plan": self.plan.to_dict()}

    def evidence(self) -> Evidence:
        """Return what they say as evidence, in which nothing is claimed yet."""
        head = self.head if self.digests else None
        return Evidence(self.plan, self.ledger, self.run_id, self.weaknesses, head=head)


def write_line(path: Path, size: int, line: bytes) -> None:
    """Put a line behind the first ``size`` bytes of a file, durably; what was torn there is cut."""
    with open(path, "r+b" if path.exists() else "xb") as stream:
        stream.truncate(size)
        stream.seek(size)
        stream.write(line)
        stream.flush()
        os.fsync(stream.fileno())
    if size == 0:
        sync_folder(path.parent)


def write_head(folder: Path, head: Head) -> None:
    """Replace the head beside a ledger, durably."""
    replace_file(folder / HEAD, [json.dumps(head.to_dict()).encode(), b"\n"])


def read_head(folder: Path) -> Head | None:
    """Return the head beside a ledger; None where there is none. Raises: LedgerError."""
    try:
        return Head.from_dict(loads((folder / HEAD).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, LedgerError) as error:
        raise damaged(folder / HEAD, str(error)) from error


def read_own(folder: Path) -> Lines | None:
    """Return the ledger of the run in a folder, or None. A last line that cannot be read is cut
    where the head does not count it: nothing was released for it."""
    head = read_head(folder)
    return _read(folder / LEDGER, 0 if head is None else head.lines, may_be_torn=True)


def read_copy(folder: Path) -> Lines | None:
    """Return the copy in a checkpoint; None where there is none. Raises: LedgerError."""
    return _read(folder / COPY, 0, may_be_torn=False)


def _read(path: Path, counted: int, *, may_be_torn: bool) -> Lines | None:
    try:
        *whole, torn = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LedgerError(f"{path} cannot be read ({error}). Make it readable.") from error
    if torn and not may_be_torn:
        raise damaged(path, "its last line is incomplete")
    found: Lines | None = None
    for number, text in enumerate(whole, start=1):
        try:
            lines = _begun(text) if found is None else found
            lines.take(text + b"\n")
        except _WRONG as why:
            if may_be_torn and number == len(whole) and number > counted:
                break
            raise damaged(path, f"line {number}: {why!r}") from why
        found = lines
    return found


def _begun(first: bytes) -> Lines:
    values = loads(first.decode())
    return Lines(values["run_id"], PrivacyPlan.from_dict(values["plan"]))


def damaged(path: Path, why: str) -> LedgerError:
    """Return the error for a file of a ledger that is not as it was written."""
    return LedgerError(
        f"{path} was edited or damaged ({why}). Restore it from a backup that is not older: "
        "without it, it is not known what this run has released."
    )


def lock_run(folder: Path) -> FileLock:
    """Take the lock of the run in a folder, which the system drops when the process dies. If two
    processes resumed one run, each would record its own "step 51", and one would be lost."""
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise LedgerError(
            f"Another process is training in output_dir {folder.name!r}; two processes cannot "
            "share one ledger. Wait for it to end, or use another output_dir."
        ) from None
    return lock
