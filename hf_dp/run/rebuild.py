"""Rebuild a run's ``privacy.json`` from its marks: add steps that it lost, and remove nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

from hf_dp.accounting import Ledger
from hf_dp.errors import LedgerError
from hf_dp.run.lock import lock_run
from hf_dp.run.mark import RUN_MARK, Mark, in_words, write_mark
from hf_dp.run.marks import Found, checkpoints, marks_of_run, read_copy
from hf_dp.statement.digests import Beside
from hf_dp.statement.record import (
    FILE_NAME,
    DamagedRecordError,
    PrivacyRecord,
    read,
    to_record,
    write,
)
from hf_dp.statement.statement import PrivacyStatement, RunFacts


@dataclass(frozen=True)
class Rebuilt:
    """What :func:`rebuild` did.

    Attributes:
        record: what ``privacy.json`` says now.
        added: the releases that it lacked.
        changed: whether it was rewritten.
        set_aside: where a file that could not be read was moved; None when there was none.
        had_mark: whether the run's own mark was there. Without it, nothing shows whether anything
            is still missing.
    """

    record: PrivacyRecord
    added: Ledger
    changed: bool
    set_aside: Path | None
    had_mark: bool


def rebuild(folder: Path) -> Rebuilt:
    """Write the longest ledger that a run's files know into its ``privacy.json`` and its mark.

    Weaknesses are merged over all files. A ``privacy.json`` that lacks nothing stays as it is.

    Raises: LedgerError when another process is at work on the run, when files are of different runs
        or know steps that do not continue each other, when nothing shows how far the run went, or
        when a file cannot be read.
    """
    if not any((folder / name).exists() for name in (FILE_NAME, RUN_MARK)):
        raise LedgerError(
            f"Expected {folder} to be the output folder of a run, with a {FILE_NAME} or a "
            f"{RUN_MARK}; it has neither. Name the run's own output_dir. If both were lost there, "
            "restore a backup of the whole folder that is not older."
        )
    if folder.resolve().name.startswith("checkpoint-"):
        raise LedgerError(
            f"{folder} is a checkpoint, and its ledger ends there. Name the output folder of its "
            "run."
        )
    lock = lock_run(folder)
    try:
        return _rebuild(folder)
    finally:
        lock.release()


def _rebuild(folder: Path) -> Rebuilt:
    path = folder / FILE_NAME
    found = marks_of_run(folder)
    had_mark = any(item.own for item in found)
    try:
        record: PrivacyRecord | None = read(folder)
    except DamagedRecordError:
        record = None
    if record is not None:
        found = [Found(path, Mark.of(record), is_record=True), *found]
    run = _longest(found)
    if not had_mark and (record is None or not record.ledger.extends(run.ledger)):
        raise LedgerError(
            f"{folder} has no {RUN_MARK}, and its {FILE_NAME} is damaged or lacks what other files "
            f"of the run know ({in_words(run.ledger)}), so nothing shows how far the run went. "
            "Restore a backup of the whole folder that is not older; without one the privacy of "
            "this run is not known."
        )
    before = Ledger() if record is None else record.ledger
    set_aside = None
    changed = record is None or bool(Mark.of(record).lacks(run))
    if changed:
        known = record or _newest_copy(folder)
        if record is None and os.path.lexists(path):
            set_aside = _set_aside(path)
        statement = _restated(known, run)
        write(
            path,
            to_record(
                known.plan,
                run.ledger,
                run_id=run.run_id,
                weaknesses=run.weaknesses,
                statement=statement,
                beside=Beside(known.card),
            ),
        )
    write_mark(folder / RUN_MARK, run)
    return Rebuilt(read(folder), _added(before, run.ledger), changed, set_aside, had_mark)


def _restated(record: PrivacyRecord, run: Mark) -> PrivacyStatement | None:
    """Make the statement of the whole ledger, from the facts of an older one; None without one."""
    if record.statement is None:
        return None
    facts = replace(RunFacts.from_dict(record.statement["facts"]), **vars(run.weaknesses))
    return PrivacyStatement.from_ledger(record.plan, run.ledger, facts)


def _longest(found: Sequence[Found]) -> Mark:
    """Return the mark whose ledger continues all others, with the weaknesses of all."""
    first = found[0]
    for item in found:
        if item.mark.run_id != first.mark.run_id:
            raise LedgerError(
                f"{first.where} is of run {first.mark.run_id}, and {item.where} is of run "
                f"{item.mark.run_id}; one folder is for one run. Move the files of one of the two "
                "to a folder of their own."
            )
    longest = max(found, key=lambda item: item.mark.ledger.steps())
    for item in found:
        if not longest.mark.ledger.extends(item.mark.ledger):
            raise LedgerError(
                f"{longest.where} ({in_words(longest.mark.ledger)}) and {item.where} "
                f"({in_words(item.mark.ledger)}) are of one run, and neither ledger continues the "
                "other: two copies of the run went on from the same point, or a file was edited. "
                "No ledger here counts both. Restore a backup of the whole folder that is not "
                "older; without one the privacy of this run is not known."
            )
    weaknesses = reduce(
        lambda one, other: one.merged(other), (item.mark.weaknesses for item in found)
    )
    return replace(longest.mark, weaknesses=weaknesses)


def _newest_copy(folder: Path) -> PrivacyRecord:
    for checkpoint in reversed(checkpoints(folder)):
        if (checkpoint / FILE_NAME).exists():
            return read_copy(checkpoint)
    raise LedgerError(
        f"{FILE_NAME} in {folder} is missing or damaged, and no checkpoint has a copy with the "
        "plan of the run. Restore a backup of the whole folder that is not older; without one the "
        "privacy of this run is not known."
    )


def _set_aside(path: Path) -> Path:
    """Keep the damaged file under another name, since it is evidence as well."""
    number = 1
    while (kept := path.with_name(f"_damaged-{number}-{path.name}")).exists():
        number += 1
    os.replace(path, kept)
    return kept


def _added(before: Ledger, after: Ledger) -> Ledger:
    """Return what ``after`` adds to ``before``, which it extends."""
    added, known = Ledger(), before.entries
    for index, entry in enumerate(after.entries):
        steps = entry.event.steps - (known[index].event.steps if index < len(known) else 0)
        if steps:
            added.append(entry.event.with_steps(steps), entry.purpose)
    return added
