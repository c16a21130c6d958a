"""What must agree before a run goes on: its ledger, what anything else knows of it, the plan."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from hf_dp.errors import LedgerError
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.run.ledger_file import COPY, LEDGER, Lines, damaged, read_copy
from hf_dp.run.witnesses import whole_ledger

# What the plan calls it -> what DPTrainer's user calls it; most telling first.
_ARGUMENTS = {
    "num_examples": "the rows of `train_dataset`",
    "expected_batch_size": "",
    "clipping_norm": "`per_example_max_grad_norm`",
    "target_epsilon": "",
    "loss": "`noised_loss_bound`, `noised_loss_budget_ratio`",
    "noise_multiplier": "",
    "delta": "`target_delta`",
    "draw": "`sampling`, `max_logical_batch_size`, `unit_sampling`",
}


def ledgers_to_resume(
    folder: Path, checkpoint: Path, plan: PrivacyPlan, earlier_runs: Collection[str]
) -> tuple[Lines, Lines]:
    """Return (the run's ledger, the checkpoint's copy).

    Args: folder: of the run. earlier_runs: ids of the earlier runs that are named now.

    Raises: LedgerError when the checkpoint or the run has no ledger, when they are of different
        runs, when the run's does not contain what anything else knows, or when the plan changed.
    """
    copy = read_copy(checkpoint)
    if copy is None:
        raise damaged(checkpoint / COPY, "it is missing")
    own = whole_ledger(folder, checkpoint)
    if own is None:
        raise damaged(folder / LEDGER, "it is missing")
    _refuse_another_plan(own.plan, plan)
    if set(earlier_runs) != {claim.run_id for claim in own.weaknesses.earlier}:
        raise other_earlier_runs()
    return own, copy


def other_earlier_runs() -> LedgerError:
    """Return the error for other earlier runs than the ledger began with; the caller raises it."""
    return LedgerError(
        "Expected `earlier_runs` to name what the ledger of this run began with, got others: its "
        "statement would not cover what is named. Name the same runs as at the start, or start "
        "anew in another output_dir."
    )


def _refuse_another_plan(then: PrivacyPlan, now: PrivacyPlan) -> None:
    old, new = ({**plan.to_dict(), **plan.to_dict()["mechanism"]} for plan in (then, now))
    # What the user sets comes before what is derived from it.
    names = [*_ARGUMENTS, *sorted((old | new).keys() - {*_ARGUMENTS, "mechanism", "steps"})]
    for name in names:
        if old.get(name) != new.get(name):
            argument = _ARGUMENTS.get(name, "")
            raise LedgerError(
                f"Cannot resume: `{name}`{argument and f' ({argument})'} is {new.get(name)!r} but "
                f"the run was started with {old.get(name)!r}. Resume with the same arguments and "
                "data, or start a new run in a new output_dir."
            )
