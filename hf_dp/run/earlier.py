"""What earlier private runs on the same rows released, and what they leave unprotected."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_dp._validate import invalid
from hf_dp.accounting import EARLIER, LedgerEntry
from hf_dp.batches.units import UnitTable
from hf_dp.run.ledger_file import LEDGER
from hf_dp.run.user_grouping import APART, SECRET_FILE, is_grouping_of
from hf_dp.run.user_grouping import FILE_NAME as USERS_FILE
from hf_dp.run.witnesses import read_run
from hf_dp.statement.facts import EarlierRun, each_once
from hf_dp.statement.record import PrivacyRecord, earlier_runs, file_of


def earlier_entries(
    paths: Iterable[str],
    num_examples: int,
    privacy_unit: str,
    neighboring_relation: str,
    units: UnitTable | None = None,
) -> list[LedgerEntry]:
    """Return what the runs in these folders released of the same rows.

    Args: units: whose the rows are, where users are protected.

    Raises: LedgerError for a file that cannot be read, or that went back; InvalidArgumentError for
        a run on another number of rows, with another unit or relation, or with other users: its
        claim and this one's have nothing in common.
    """
    entries = []
    for path in paths:
        record = whole_run(path)
        plan = record.plan
        for name, theirs, ours in (
            ("privacy_unit", plan.privacy_unit, privacy_unit),
            ("neighboring_relation", plan.neighboring_relation, neighboring_relation),
        ):
            if theirs != ours:
                raise invalid(
                    "earlier_runs",
                    path,
                    f"to be a run with {name}={ours!r}, not {theirs!r}",
                    f"No bound is known for both together. Set {name}={theirs!r} here as well.",
                )
        if plan.num_examples != num_examples:
            raise invalid(
                "earlier_runs",
                path,
                f"to be a run on the same {num_examples} {'rows' if units is None else 'users'}, "
                f"not on {plan.num_examples}",
                "A run on other rows costs these nothing: leave it out. If it is in output_dir, "
                "choose another output_dir.",
            )
        if plan.users is not None:
            _refuse_other_users(path, plan.users.column, record.run_id, units)
        entries += released_by(record)
    return entries


def released_by(record: PrivacyRecord) -> list[LedgerEntry]:
    """Return what a run released, as a later run on the same rows counts it."""
    return [LedgerEntry(entry.event, EARLIER) for entry in record.ledger.entries]


def _refuse_other_users(path: str, column: str, run_id: str, units: UnitTable | None) -> None:
    """Raise InvalidArgumentError for a run by another column, or one in which other rows were one
    user's: whoever is one user here may have been two users there."""
    if units is not None and column != units.column:
        raise invalid(
            "earlier_runs",
            path,
            f"to be a run with privacy_unit_column={units.column!r}, not {column!r}",
            "Rows that are one user's by one column may be several users' by another, so no "
            "bound is known for both together.",
        )
    known = is_grouping_of(_home(path), run_id, units)
    if known is None:
        raise invalid(
            "earlier_runs",
            path,
            f"to be a run whose {USERS_FILE} and {SECRET_FILE} say which rows were one user's (its "
            "own output_dir holds these files, and no copy of its weights does)",
            f"Name that output_dir, bring the files back from a backup, or {APART}",
        )
    if not known:
        raise invalid(
            "earlier_runs",
            path,
            f"to be a run in which {column!r} grouped the rows as it does now (the order of the "
            "rows counts, too)",
            "One user here may be several users of that run. Group and order the rows as then, or "
            f"{APART}",
        )


def earlier_claims(paths: Iterable[str]) -> tuple[EarlierRun, ...]:
    """Return what these runs, and the runs that they name in turn, leave unprotected.

    Raises: LedgerError for a file that cannot be read, or that went back.
    """
    return each_once(claim for path in paths for claim in earlier_runs(whole_run(path)))


def whole_run(path: str) -> PrivacyRecord:
    """Return what a run released; for one of its checkpoints, also what it released after that."""
    record, home = read_run(path), _home(path)
    if home != _folder_of(path) and (home / LEDGER).exists():
        run = read_run(home)
        if run.run_id == record.run_id:
            return run
    return record


def _home(path: str) -> Path:
    """Return the folder of the run at a path, which may be that of one of its checkpoints."""
    folder = _folder_of(path)
    return folder.parent if folder.name.startswith(PREFIX_CHECKPOINT_DIR) else folder


def _folder_of(path: str) -> Path:
    return file_of(path).parent.resolve()
