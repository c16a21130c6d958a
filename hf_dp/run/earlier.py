"""Earlier private runs on the same rows: what is recorded of them, and whose each row was.

Where users are protected, each step protects what was one user's rows in that step. If a resume, or
a later run that counts this one, groups the rows in another way, the rows of a user of the first
steps may be those of several users later, and no statement about one of them holds for all steps.
So a run remembers whose each row was.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_dp._validate import invalid
from hf_dp.accounting.knows import NO_BOUND
from hf_dp.batches.units import UnitTable
from hf_dp.errors import LedgerError
from hf_dp.run.ledger_file import LEDGER
from hf_dp.run.witnesses import read_run
from hf_dp.statement.durable import replace_file
from hf_dp.statement.evidence import Evidence, file_of

# A digest of which rows belong together, which is private, and the secret that it is keyed with,
# without which nobody can try groupings. Names that begin with "_" are never published.
USERS_FILE, SECRET_FILE = "_users.json", "_users_secret.json"

_APART = (
    "begin a run in a new output_dir, without earlier_runs: the card of each run "
    "then speaks of that run and its own users, and no epsilon is known for both together."
)


def earlier_evidence(
    paths: Iterable[str],
    num_examples: int,
    privacy_unit: str,
    neighboring_relation: str,
    units: UnitTable | None = None,
) -> list[Evidence]:
    """Return what is recorded of the runs in these folders, or raise InvalidArgumentError for one
    on other rows, or with another unit, relation or users: no bound is known for both."""
    found = []
    for path in paths:
        evidence = _whole_run(path)
        plan = evidence.plan
        for name, theirs, ours in (
            ("privacy_unit", plan.privacy_unit, privacy_unit),
            ("neighboring_relation", plan.neighboring_relation, neighboring_relation),
            ("num_examples", plan.num_examples, num_examples),
        ):
            if theirs != ours:
                raise invalid(
                    "earlier_runs",
                    path,
                    f"to be a run with {name}={ours!r}, not {theirs!r}",
                    f"{NO_BOUND} Leave it out only if it saw none of these rows: then it costs "
                    "them nothing. To go on with new rows, train on these alone, with "
                    "other_training='other_rows' in its place, or on all rows, from the public "
                    "base. (Canaries count as rows: audit_canaries of both runs must be the "
                    "same.) If it is in output_dir, choose another output_dir.",
                )
        if plan.users is not None:
            _refuse_other_users(path, plan.users.column, evidence.run_id, units)
        found.append(evidence)
    return found


def _refuse_other_users(path: str, column: str, run_id: str, units: UnitTable | None) -> None:
    """Raise InvalidArgumentError for a run whose users were others: whoever is one user here may
    have been two users there."""
    known = None if units is None else is_grouping_of(_home(path), run_id, units)
    if units is not None and column == units.column and known:
        return
    now = None if units is None else units.column
    expected = f"to be a run in which {now!r} grouped the rows as it does now (their order counts, "
    expected += f"too), not one by {column!r}"
    if known is None:
        expected = f"to be a run whose {USERS_FILE} and {SECRET_FILE} say which rows were one "
        expected += "user's (its own output_dir holds these files, and no copy of its weights does)"
    raise invalid(
        "earlier_runs",
        path,
        expected,
        "One user here may be several users of that run. Name its output_dir, with these files and "
        f"the rows as then, or {_APART}",
    )


def _whole_run(path: str) -> Evidence:
    """Return what a run released; for one of its checkpoints, also what it released after that."""
    evidence, home = read_run(path), _home(path)
    if home != file_of(path).parent.resolve() and (home / LEDGER).exists():
        run = read_run(home)
        if run.run_id == evidence.run_id:
            return run
    return evidence


def _home(path: str) -> Path:
    """Return the folder of the run at a path, which may be that of one of its checkpoints."""
    folder = file_of(path).parent.resolve()
    return folder.parent if folder.name.startswith(PREFIX_CHECKPOINT_DIR) else folder


def same_users(folder: Path, run_id: str, units: UnitTable, begun: bool) -> None:
    """Write down which rows belong together or, in a run that has ``begun`` to draw, raise
    LedgerError when that is not what was written down."""
    if not begun:
        secret = secrets.token_hex(32)
        for name, value in ((SECRET_FILE, secret), (USERS_FILE, units.digest(secret))):
            replace_file(folder / name, [json.dumps({"run_id": run_id, "value": value}).encode()])
            (folder / name).chmod(0o600)
        return
    known = is_grouping_of(folder, run_id, units)
    if known is None:
        raise LedgerError(
            f"Cannot resume: {USERS_FILE} or {SECRET_FILE} in output_dir {folder.name!r} is "
            "missing, damaged or from another run. Together they say which rows were one user's "
            f"in the earlier steps. Restore both from a backup, or {_APART}"
        )
    if not known:
        raise LedgerError(
            f"Cannot resume: the column {units.column!r} groups the rows differently than when the "
            "run began (the order of the rows counts, too), so a user of the first steps would "
            f"not be one of the later steps. Resume with the same rows, or {_APART}"
        )


def is_grouping_of(folder: Path, run_id: str, units: UnitTable) -> bool | None:
    """Return whether these rows were one user's in the run in a folder; None if not known."""
    secret, known = (_kept(folder, run_id, name) for name in (SECRET_FILE, USERS_FILE))
    if secret is None or known is None:
        return None
    return units.digest(secret) == known


def _kept(folder: Path, run_id: str, name: str) -> str | None:
    try:
        then = json.loads((folder / name).read_text())
        return then["value"] if then["run_id"] == run_id and len(then["value"]) == 64 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
