"""What must agree before a run goes on: the run's ledger, the checkpoint's, the marks, the plan."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from hf_dp.errors import LedgerError
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.run.mark import Mark, in_words
from hf_dp.run.marks import marks_in, marks_of_run, read_copy, rebuild_advice, refuse_unknown_to
from hf_dp.statement.record import FILE_NAME, PrivacyRecord, read

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


def records_to_resume(
    folder: Path, checkpoint: Path, plan: PrivacyPlan, earlier_runs: Collection[str]
) -> tuple[PrivacyRecord, PrivacyRecord]:
    """Return (the run's record, the checkpoint's).

    Args: folder: of the run. earlier_runs: ids of the earlier runs that are named now.

    Raises: LedgerError when the checkpoint or the run has no ledger, when they are of different
        runs, when the run's is shorter than the checkpoint's, or when the plan changed.
    """
    at_checkpoint = read_copy(checkpoint)
    try:
        run = read(folder)
    except LedgerError as problem:
        raise LedgerError(
            f"Cannot resume: the run's own {FILE_NAME} in output_dir is missing or damaged "
            f"({problem}). The checkpoint's copy does not know the steps made after it. Resume "
            f"with the output_dir of the original run. If this is it: {rebuild_advice(folder)}"
        ) from problem
    if run.run_id != at_checkpoint.run_id:
        raise LedgerError(
            f"Cannot resume: the checkpoint belongs to run {at_checkpoint.run_id}, output_dir to "
            f"run {run.run_id}. Use the output_dir that the checkpoint was written under."
        )
    if not run.ledger.extends(at_checkpoint.ledger):
        raise LedgerError(
            f"Cannot resume: the run's ledger ({in_words(run.ledger)}) does not contain the "
            f"checkpoint's ({in_words(at_checkpoint.ledger)}). One of the two {FILE_NAME} files "
            f"was replaced. {rebuild_advice(folder)}"
        )
    refuse_unknown_to(Mark.of(run), folder, [*marks_of_run(folder), *marks_in(checkpoint)])
    _refuse_another_plan(run.plan, plan)
    if set(earlier_runs) != {claim.run_id for claim in run.weaknesses.earlier}:
        raise other_earlier_runs()
    return run, at_checkpoint


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
