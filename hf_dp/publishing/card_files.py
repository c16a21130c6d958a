"""The card and the evidence of a saved run, as they are published."""

from __future__ import annotations

from pathlib import Path

from hf_dp.errors import LedgerError
from hf_dp.run.marks import marks_in, read_run
from hf_dp.statement.record import FILE_NAME, RUNNING


def card_files(
    folder: Path, *, repository: str | None = None, base_model: str | None = None
) -> dict[str, bytes]:
    """Return README.md and privacy.json.

    Raises: LedgerError where privacy.json is missing, of a run that has not ended, or does not
        belong to the weights beside it.
    """
    record = read_run(folder)
    if record.status == RUNNING:
        raise LedgerError(
            f"{FILE_NAME} in {folder} is of a run that is under way or was killed, so it states no "
            "epsilon. Publish a checkpoint, or resume the run and let it end."
        )
    if not marks_in(folder):
        raise LedgerError(f"Nothing ties the weights in {folder} to its {FILE_NAME}.")
    return {name: (folder / name).read_bytes() for name in ("README.md", FILE_NAME)}
