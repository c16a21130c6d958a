"""Which folder a run may use.

It may not use another run's folder, whose evidence or weights would be lost or mixed with its own.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from hf_dp.errors import LedgerError
from hf_dp.run.mark import in_words
from hf_dp.run.marks import mark_files_in, rebuild_advice
from hf_dp.statement.record import FILE_NAME, read

# What the folder of a run that was moved aside begins with. Names that start with "_" are never
# pushed to the Hub, nor taken for weights of the new run.
ASIDE = "_earlier-run-"


def refuse_leftovers(folder: Path) -> None:
    """Raise LedgerError for another run's weights or logs in a folder.

    The statement of a new run would seem to cover them.
    """
    patterns = ("*.safetensors", "*.bin", "checkpoint-*", "trainer_state.json")
    found = sorted(path.name for pattern in patterns for path in folder.glob(pattern))
    if found:
        raise LedgerError(
            f"output_dir {folder.name!r} already holds {found[0]!r} but no {FILE_NAME}: weights or "
            "logs of another run. Choose a new output_dir; otherwise this run's privacy statement "
            "would seem to cover them."
        )


def refuse_foreign_ledger(folder: str | os.PathLike[str], run_id: str | None) -> None:
    """Raise LedgerError when a folder holds the ledger or mark of a run other than ``run_id``.

    None means any run.
    """
    folder = Path(folder)
    if (folder / FILE_NAME).exists() and (earlier := read(folder)).run_id != run_id:
        raise LedgerError(
            f"The folder {folder.name!r} already holds the {FILE_NAME} of another run "
            f"({earlier.ledger.steps()} steps). Pass resume_from_checkpoint to continue that run, "
            "or choose another folder (a new output_dir). Otherwise the evidence of what was spent "
            "would be overwritten, or left beside weights that it does not describe."
        )
    for item in mark_files_in(folder):
        if item.mark.run_id != run_id:
            raise LedgerError(
                f"The folder {folder.name!r} holds {item.where.name} of another run "
                f"({in_words(item.mark.ledger)}), but not its {FILE_NAME}. Choose another folder "
                f"(a new output_dir). To continue that run: {rebuild_advice(folder)}"
            )


def aside_of(folder: Path, run_id: str) -> Path:
    """Return where a start over in ``folder`` moves the run of that id."""
    return folder / f"{ASIDE}{run_id[:8]}"


def moved_aside(folder: Path) -> dict[str, Path]:
    """Return the runs that a start over moved aside in a folder, by id."""
    aside = sorted(path for path in folder.glob(f"{ASIDE}*") if (path / FILE_NAME).exists())
    return {read(path).run_id: path for path in aside}


def refuse_uncounted(folder: Path, counted: Collection[str]) -> None:
    """Raise LedgerError for a run that was moved aside in a folder and that no run counts.

    Args: counted: the ids of the runs that the run in the folder counts.
    """
    found = moved_aside(folder)
    known = set(counted)
    for path in found.values():
        known |= {claim.run_id for claim in read(path).weaknesses.earlier}
    for run_id, path in found.items():
        if run_id not in known:
            raise LedgerError(
                f"The folder {folder.name!r} holds {path.name!r}, an earlier run on the same rows "
                f"that this run does not count. Name it: earlier_runs=[{str(path)!r}]; or choose "
                "another output_dir for other rows."
            )
