"""Remember whose each row was, so that all steps that one statement counts protect the same users.

Each step protects what was one user's rows in that step. If a resume, or a later run that counts
this one, groups the rows in another way, the rows of a user of the first steps may be those of
several users later, and no statement about one of them holds for all steps.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from hf_dp.batches.units import UnitTable
from hf_dp.errors import LedgerError
from hf_dp.statement.durable import replace_file

# A digest of private data, and the secret that it is keyed with, without which nobody can try
# groupings. Names that begin with "_" are never published.
FILE_NAME, SECRET_FILE = "_users.json", "_users_secret.json"

# What is left to do where two groupings cannot be counted together.
APART = (
    "begin a run in a new output_dir, without earlier_runs: the card of each run "
    "then speaks of that run and its own users, and no epsilon is known for both together."
)


def same_users(folder: Path, run_id: str, units: UnitTable, begun: bool) -> None:
    """Write down which rows belong together, or compare it with what was written down.

    Args:
        folder: of the run.
        units: whose the rows are now.
        begun: whether the run has drawn before.

    Raises: LedgerError when the run has drawn from other groups of rows, or from unknown ones.
    """
    if not begun:
        secret = secrets.token_hex(32)
        for name, value in ((SECRET_FILE, secret), (FILE_NAME, units.digest(secret))):
            replace_file(folder / name, [json.dumps({"run_id": run_id, "value": value}).encode()])
            (folder / name).chmod(0o600)
        return
    known = is_grouping_of(folder, run_id, units)
    if known is None:
        raise LedgerError(
            f"Cannot resume: {FILE_NAME} or {SECRET_FILE} in output_dir {folder.name!r} is "
            "missing, damaged or of another run. Together they say which rows were one user's in "
            f"the steps before. Bring both back from a backup, or {APART}"
        )
    if not known:
        raise LedgerError(
            f"Cannot resume: the column {units.column!r} groups the rows in another way than when "
            "the run began (the order of the rows counts, too), so a user of the first steps would "
            f"not be one of the later steps. Resume with the same rows, or {APART}"
        )


def is_grouping_of(folder: Path, run_id: str, units: UnitTable | None) -> bool | None:
    """Return whether these rows were one user's in the run in a folder; None where that is not
    known."""
    secret, known = (_kept(folder, run_id, name) for name in (SECRET_FILE, FILE_NAME))
    if secret is None or known is None:
        return None
    return units is not None and units.digest(secret) == known


def _kept(folder: Path, run_id: str, name: str) -> str | None:
    try:
        then = json.loads((folder / name).read_text())
        if then["run_id"] == run_id and isinstance(then["value"], str):
            return then["value"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None
