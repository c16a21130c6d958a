"""All marks of a run, wherever they traveled.

A ledger that lacks what one of them knows went back.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

from hf_dp.errors import LedgerError
from hf_dp.run.mark import COPIED_MARK, RUN_MARK, Mark, read_mark, read_stamp
from hf_dp.run.weights_file import weights_files
from hf_dp.statement.record import (
    FILE_NAME,
    RESTORE,
    DamagedRecordError,
    PrivacyRecord,
    file_of,
    read,
)
from hf_dp.statement.weaknesses import Weaknesses


@dataclass(frozen=True)
class Found:
    """A mark and the file in which it was found.

    Attributes:
        where: the file.
        mark: what it says.
        own: whether the file is the run's own mark, which no copy of a checkpoint contains.
        is_record: whether the file is a ``privacy.json``, which an earlier version of hf_dp may
            have written.
    """

    where: Path
    mark: Mark
    own: bool = False
    is_record: bool = False


def mark_files_in(folder: Path) -> list[Found]:
    """List the mark files in one folder. Raises: LedgerError for a damaged one."""
    names = [name for name in (RUN_MARK, COPIED_MARK) if (folder / name).exists()]
    return [Found(folder / name, read_mark(folder / name), own=name == RUN_MARK) for name in names]


def marks_in(folder: Path) -> list[Found]:
    """List the marks in one folder: mark files, and marks in weights.

    Raises: LedgerError naming a file that cannot be read.
    """
    stamps = [(path, read_stamp(path)) for path in weights_files(folder)]
    return [
        *mark_files_in(folder),
        *(Found(path, mark) for path, mark in stamps if mark is not None),
    ]


def marks_of_run(folder: Path) -> list[Found]:
    """List the marks in a run's folder and in its checkpoints.

    A checkpoint's ``privacy.json`` counts as a mark.

    Raises: LedgerError naming a file that cannot be read.
    """
    found = marks_in(folder)
    for checkpoint in checkpoints(folder):
        # A run's own mark that was copied into a checkpoint is not its own there.
        found += [replace(item, own=False) for item in marks_in(checkpoint)]
        if (checkpoint / FILE_NAME).exists():
            found.append(
                Found(checkpoint / FILE_NAME, Mark.of(read_copy(checkpoint)), is_record=True)
            )
    return found


def read_copy(checkpoint: Path) -> PrivacyRecord:
    """Return a checkpoint's ``privacy.json``. Raises: LedgerError for a missing or damaged one."""
    try:
        return read(checkpoint)
    except DamagedRecordError as problem:
        raise LedgerError(
            f"The checkpoint {checkpoint.name!r} cannot be used, because its privacy record cannot "
            f"be read: {str(problem).removesuffix(RESTORE).strip()} Restore it from a backup, or "
            "move the checkpoint out of the output folder and resume from another one. The run's "
            "own ledger still counts its steps."
        ) from problem


def checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints of a run, from the oldest to the newest."""
    numbered = [path for path in folder.glob("checkpoint-*") if path.is_dir()]
    return sorted(numbered, key=lambda path: (_number(path), path.name))


def read_run(path_or_dir: str | Path) -> PrivacyRecord:
    """Return what a run's ``privacy.json`` says, with every weakness that its marks know of.

    Raises: LedgerError when the file cannot be read, or when a mark beside it is of another run or
        knows steps that it lacks.
    """
    record, path = read(path_or_dir), file_of(path_or_dir)
    if path.name != FILE_NAME:
        return record  # a copy that was put aside
    found = marks_of_run(path.parent)
    refuse_unknown_to(Mark.of(record), path.parent, found)
    known = reduce(Weaknesses.merged, (item.mark.weaknesses for item in found), record.weaknesses)
    return replace(record, weaknesses=known)


def refuse_unknown_to(run: Mark, folder: Path, found: Iterable[Found]) -> None:
    """Raise LedgerError when a mark is of another run than ``run``, or knows steps that it lacks.

    Weaknesses are merged, not refused: a checkpoint can note one before the run's own record is
    written again.
    """
    for item in found:
        if item.mark.run_id != run.run_id:
            raise LedgerError(
                f"{item.where} is of run {item.mark.run_id}, and {FILE_NAME} in {folder} is of run "
                f"{run.run_id}; one folder is for one run. Move the files of one of the two to a "
                "folder of their own."
            )
        if not run.ledger.extends(item.mark.ledger):
            raise LedgerError(
                f"{FILE_NAME} in {folder} went back: it lacks what {_shown(item.where, folder)} "
                f"knows of the same run, {run.lacks(item.mark)}. The missing steps would not be "
                f"counted. {rebuild_advice(folder)}"
            )


def refuse_without_own_mark(run: Mark, folder: Path, found: Iterable[Found]) -> None:
    """Raise LedgerError when a folder has marks of copies, but not the run's own mark.

    Either the folder is a copy of a checkpoint, whose ledger ends there, or its mark was deleted.
    """
    marks = [item for item in found if not item.is_record]
    if len(run.ledger) and marks and not any(item.own for item in marks):
        raise LedgerError(
            f"{folder} holds {FILE_NAME} and {_shown(marks[0].where, folder)} of run {run.run_id}, "
            f"but not the run's own {RUN_MARK}: it is a copy of a checkpoint, or the mark was "
            "deleted. What ran after the copy was made would not be counted. Continue in the run's "
            f"own output_dir. If this is it: {rebuild_advice(folder)}"
        )


def rebuild_advice(folder: Path) -> str:
    """Say how to repair a run's ledger."""
    command = f"hf-dp account rebuild {shlex.quote(str(folder))}"
    return f"Run `{command}`, or restore a backup of the whole folder that is not older."


def _shown(path: Path, folder: Path) -> Path:
    return path.relative_to(folder) if path.is_relative_to(folder) else path


def _number(path: Path) -> int:
    number = path.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1
