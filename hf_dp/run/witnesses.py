"""Whatever knows how far a run has come: the head, and what traveled with checkpoints and weights.

A ledger that does not contain what one of them knows went back, and nobody goes on with it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hf_dp.errors import LedgerError
from hf_dp.run.ledger_file import COPY, HEAD, LEDGER, Lines, damaged, read_copy, read_head, read_own
from hf_dp.run.weights_file import head_in, weights_files
from hf_dp.statement.durable import Head
from hf_dp.statement.evidence import FILE_NAME, Evidence, file_of, read

_BACKUP = "Restore a backup of the whole folder that is not older; without it, the privacy of this "
_BACKUP += "run is not known."


def checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a run's folder by their steps, the newest first."""
    found = [
        (int(number), path)
        for path in folder.glob("checkpoint-*")
        if (number := path.name.removeprefix("checkpoint-")).isdecimal() and path.is_dir()
    ]
    return [path for _, path in sorted(found, reverse=True)]


def heads_in(folder: Path) -> Iterator[tuple[Path, Head]]:
    """Yield what the files of one folder know, besides the ledger itself.

    Raises: LedgerError naming a file that cannot be read.
    """
    if (head := read_head(folder)) is not None:
        yield folder / HEAD, head
    if (copy := read_copy(folder)) is not None:
        yield folder / COPY, copy.head
    if (folder / FILE_NAME).exists() and (head := read(folder).head) is not None:
        yield folder / FILE_NAME, head
    for path in weights_files(folder):
        if (head := head_in(path)) is not None:
            yield path, head


def whole_ledger(folder: Path, *others: Path) -> Lines | None:
    """Return the ledger of the run in a folder; None where none has begun there.

    Raises: LedgerError when anything in the folder, its checkpoints or other folders knows what
        the ledger does not contain; and when the folder is a copy of a checkpoint.
    """
    places = dict.fromkeys([folder, *checkpoints(folder), *others])
    known = [found for place in places for found in heads_in(place)]
    own = read_own(folder)  # last: the run may be going on
    for where, head in known:
        if own.contains(head) if own is not None else head.lines == 0:
            continue
        if own is not None and own.run_id != head.run_id:
            raise LedgerError(
                f"{where} is of run {head.run_id}, and {LEDGER} in {folder} is of run "
                f"{own.run_id}; one folder is for one run. Resume in the output_dir that it was "
                "written under, or move the files of one of the two to a folder of their own."
            )
        has = "is missing" if own is None else f"has {len(own.digests)} lines and not that one"
        raise LedgerError(
            f"{LEDGER} in {folder} went back: {where} knows line {head.lines} of it, and it "
            f"{has}. What is missing would not be counted. {_advice(folder, known)}"
        )
    first_alone = own is not None and len(own.digests) == 1  # a kill came before the head
    if own is not None and not first_alone and read_head(folder) is None:
        raise damaged(folder / HEAD, "it is missing")
    return own


def _advice(folder: Path, known: list[tuple[Path, Head]]) -> str:
    """Say how to put the longest copy back, where it contains all that is known."""
    if not any(where == folder / HEAD for where, _ in known):
        return (
            f"This is a copy of a checkpoint. Continue in the run's own output_dir. Else: {_BACKUP}"
        )
    for where, _ in known:
        copy = read_copy(where.parent) if where.name == COPY else None
        if copy is not None and all(copy.contains(head) for _, head in known):
            words = shlex.join(["cp", str(where), str(folder / LEDGER)])
            return f"Put the longest copy back: `{words}`."
    return f"No copy here contains it. {_BACKUP}"


def read_run(path_or_dir: str | Path) -> Evidence:
    """Return what a run has released: by its own ledger in its output folder, elsewhere by its
    ``privacy.json``.

    Raises: LedgerError when a file cannot be read, or when the ledger went back.
    """
    path = file_of(path_or_dir)
    folder = path.parent
    if path.name != FILE_NAME or not any((folder / name).exists() for name in (LEDGER, HEAD)):
        return read(path_or_dir)
    own = whole_ledger(folder)
    if own is None:
        raise damaged(folder / LEDGER, "no line of it is whole")
    known = own.evidence()
    stated = read(folder) if path.exists() else None
    if stated is None or stated.head != own.head:
        return known
    return replace(stated, plan=own.plan, ledger=own.ledger, weaknesses=own.weaknesses)


def refuse_leftovers(folder: Path) -> None:
    """Raise LedgerError for another run's weights or logs in a folder, which the statement of a new
    run would seem to cover."""
    patterns = ("*.safetensors", "*.bin", "checkpoint-*", "trainer_state.json")
    found = sorted(path.name for pattern in patterns for path in folder.glob(pattern))
    if found:
        raise LedgerError(
            f"output_dir {folder.name!r} already holds {found[0]!r} but no {LEDGER}: weights or "
            "logs of another run. Choose a new output_dir; otherwise this run's privacy statement "
            "would seem to cover them."
        )


def refuse_foreign(folder: Path, run_id: str | None) -> None:
    """Raise LedgerError when a folder holds what is of a run other than ``run_id``; None means any
    run."""
    for name in (LEDGER, HEAD, COPY, FILE_NAME):
        found = _run_of(folder / name)
        if found is not None and found != run_id:
            raise LedgerError(
                f"The folder {folder.name!r} holds {name} of another run ({found}). Pass "
                "resume_from_checkpoint to continue that run, or choose another folder (a new "
                "output_dir), and name this one in `earlier_runs` if it was on the same rows. "
                "Otherwise the evidence of what was spent would be lost."
            )


def _run_of(path: Path) -> str | None:
    """Return the run that a file is of; None where there is none, or no whole line of it."""
    if not path.exists():
        return None
    if path.name == FILE_NAME:
        return read(path).run_id
    with open(path, encoding="utf-8", errors="replace") as stream:
        line = stream.readline()
    try:
        return str(json.loads(line)["run_id"]) if line.endswith("\n") else None
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path, str(error)) from error
