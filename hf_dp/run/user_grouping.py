"""Remember whose each row was, so that a resumed run protects the same users.

Each step protects what was one user's rows in that step. If a resume groups the rows in another
way, the rows of a user of the first steps may be those of several users later, and no statement
about one of them holds for the whole run.
"""

from __future__ import annotations

import json
from pathlib import Path

from hf_dp.batches.units import UnitTable
from hf_dp.errors import LedgerError
from hf_dp.statement.durable import replace_file

# A digest of private data: names that begin with "_" are never published.
FILE_NAME = "_users.json"


def same_users(folder: Path, run_id: str, units: UnitTable, begun: bool) -> None:
    """Write down which rows belong together, or compare it with what was written down.

    Args:
        folder: of the run.
        units: whose the rows are now.
        begun: whether the run has drawn before.

    Raises: LedgerError when the run has drawn from other groups of rows, or from unknown ones.
    """
    path = folder / FILE_NAME
    if not begun:
        written = json.dumps({"run_id": run_id, "rows_of_users": units.digest()})
        replace_file(path, [written.encode()])
        path.chmod(0o600)
        return
    try:
        then = json.loads(path.read_text())
        known = (then["run_id"], then["rows_of_users"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise LedgerError(
            f"Cannot resume: {FILE_NAME} in output_dir {folder.name!r} is missing or damaged "
            f"({type(problem).__name__}). It says which rows were one user's in the steps before. "
            "Bring it back, or begin anew with start_over=True."
        ) from problem
    if known != (run_id, units.digest()):
        raise LedgerError(
            f"Cannot resume: the column {units.column!r} groups the rows in another way than when "
            "the run began (the order of the rows counts, too), so a user of the first steps would "
            "not be one of the later steps. Resume with the same rows, or begin anew with "
            "start_over=True."
        )
