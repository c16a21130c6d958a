"""What earlier private runs on the same rows released, and what they leave unprotected."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_dp._validate import invalid
from hf_dp.accounting import EARLIER, LedgerEntry
from hf_dp.plans.units import Users
from hf_dp.run.marks import read_run
from hf_dp.statement.record import FILE_NAME, PrivacyRecord, earlier_runs
from hf_dp.statement.weaknesses import EarlierRun, each_once


def earlier_entries(
    paths: Iterable[str],
    num_examples: int,
    privacy_unit: str,
    neighboring_relation: str,
    users: Users | None = None,
) -> list[LedgerEntry]:
    """Return what the runs in these folders released of the same rows.

    Raises: LedgerError for a file that cannot be read, or that went back; InvalidArgumentError for
        a run on another number of rows, or with another unit or relation: its claim and this one's
        have nothing in common.
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
                f"to be a run on the same {num_examples} {'rows' if users is None else 'users'}, "
                f"not on {plan.num_examples}",
                "A run on other rows costs these nothing: leave it out. If it is in output_dir, "
                "choose another output_dir.",
            )
        if plan.users is not None and users is not None and plan.users.column != users.column:
            raise invalid(
                "earlier_runs",
                path,
                f"to be a run with privacy_unit_column={users.column!r}, not {plan.users.column!r}",
                "Rows that are one user's by one column may be several users' by another, so no "
                "bound is known for both together.",
            )
        entries += [LedgerEntry(entry.event, EARLIER) for entry in record.ledger.entries]
    return entries


def earlier_claims(paths: Iterable[str]) -> tuple[EarlierRun, ...]:
    """Return what these runs, and the runs that they name in turn, leave unprotected.

    Raises: LedgerError for a file that cannot be read, or that went back.
    """
    return each_once(claim for path in paths for claim in earlier_runs(whole_run(path)))


def whole_run(path: str) -> PrivacyRecord:
    """Return what a run released; for one of its checkpoints, also what it released after that."""
    record, parent = read_run(path), Path(path).resolve().parent
    is_checkpoint = Path(path).resolve().name.startswith(PREFIX_CHECKPOINT_DIR)
    if is_checkpoint and (parent / FILE_NAME).exists():
        run = read_run(parent)
        if run.run_id == record.run_id:
            return run
    return record
