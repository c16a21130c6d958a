"""Start over in the folder of an earlier run: its files move aside, and its releases count.

Everything in the folder moves into ``_earlier-run-ID``, ``privacy.json`` last. A kill on the way
leaves ``privacy.json`` in its place, and starting over once more goes on with the move.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from transformers.utils import logging

from hf_dp.accounting import LedgerEntry
from hf_dp.errors import LedgerError
from hf_dp.run.earlier import released_by, whole_run
from hf_dp.run.folder import ASIDE, aside_of, moved_aside
from hf_dp.run.ledger import RunLedger
from hf_dp.run.lock import LOCK
from hf_dp.run.mark import RUN_MARK
from hf_dp.statement.durable import sync_folder
from hf_dp.statement.record import FILE_NAME, read

logger = logging.get_logger(__name__)


def runs_before(folder: Path, named: Iterable[str], start_over: bool) -> list[str]:
    """Return the folders of all earlier runs on the same rows: those that the user named, those
    that earlier starts moved aside, and, when the run starts over, the one in ``folder``."""
    found = moved_aside(folder)
    if start_over and (folder / FILE_NAME).exists():
        found |= {read(folder).run_id: folder}
    # Those that another one of them counts come with it.
    counted = {c.run_id for path in found.values() for c in read(path).weaknesses.earlier}
    aside = [path for run_id, path in found.items() if run_id not in counted]
    moved = {path.resolve() for path in aside}
    return [
        *(path for path in named if Path(path).resolve() not in moved),
        *(str(path) for path in aside),
    ]


def move_earlier_run(book: RunLedger, counted: Sequence[LedgerEntry]) -> None:
    """Move the run in the folder of a new one aside, durably. Deletes nothing.

    Args: book: of the new run, with its lock. counted: what the new run counts of earlier runs.

    Raises: LedgerError when the earlier run has gone on since it was read.
    """
    folder = book.folder
    if not (folder / FILE_NAME).exists() or read(folder).run_id == book.run_id:
        return
    record = whole_run(str(folder))
    entries = released_by(record)
    if list(counted)[len(counted) - len(entries) :] != entries:
        raise LedgerError(
            f"The run in output_dir {folder.name!r} has gone on since this trainer was created, "
            "and its new steps would not be counted. Create the trainer again."
        )
    aside = aside_of(folder, record.run_id)
    aside.mkdir(exist_ok=True)
    last = (RUN_MARK, FILE_NAME)
    stays = (*last, aside.name, LOCK)
    others = [
        each.name
        for each in folder.iterdir()
        if each.name not in stays and not each.name.startswith(ASIDE)
    ]
    for name in (*sorted(others), *last):
        if os.path.lexists(folder / name):
            os.rename(folder / name, aside / name)
    sync_folder(aside)
    sync_folder(folder)
    logger.warning(
        "start_over=True: the run that was in %s is now in %s. Its %d releases were on the same "
        "rows, so they begin the ledger of the new run, and both count together.",
        folder,
        aside.name,
        record.ledger.steps(),
    )


def refuse_half_moved(folder: Path) -> None:
    """Raise LedgerError for a folder whose run was being moved aside when a kill came."""
    if not (folder / FILE_NAME).exists():
        return
    aside = aside_of(folder, read(folder).run_id)
    if aside.is_dir():
        raise LedgerError(
            f"A start over of the run in output_dir {folder.name!r} was broken off: a part of its "
            f"files is in {aside.name!r}. Pass start_over=True again to go on with it; or move "
            "these files back to continue the run."
        )
