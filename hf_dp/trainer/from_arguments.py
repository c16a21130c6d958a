"""From the user's arguments to what a run works with: a checked copy, and the privacy plan."""

from __future__ import annotations

import copy
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_dp._validate import invalid
from hf_dp.accounting import EARLIER, LedgerEntry, epsilon
from hf_dp.cards.document import FILE_NAME, PrivacyRecord
from hf_dp.cards.marks import read_run
from hf_dp.cards.weaknesses import EarlierRun, each_once
from hf_dp.forward_plan import PRIVATE_ENCODER
from hf_dp.plan import PrivacyPlan
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.choice import Choice


def own_copy(args: object) -> DPTrainingArguments:
    """A checked copy of the arguments: steps are written into it, and the caller's may serve
    another run."""
    if not isinstance(args, DPTrainingArguments):
        raise invalid(
            "args",
            type(args).__name__,
            "to be DPTrainingArguments",
            "Replace TrainingArguments(...) by DPTrainingArguments(..., target_epsilon=3, "
            "expected_batch_size=1024).",
        )
    args = copy.copy(args)
    args.check()
    return args


def plan_of(
    args: DPTrainingArguments,
    num_examples: int,
    choice: Choice | None,
    num_classes: int | None = None,
) -> PrivacyPlan:
    """The plan for these arguments; an accountant that cannot describe it refuses here, not after
    the training."""
    forward = args.forward_plan(num_classes)
    spent = tuple(entry.event for entry in earlier_entries(args, num_examples))
    only_rows = forward is not None and forward.variant != PRIVATE_ENCODER
    plan = PrivacyPlan.create(
        num_examples=num_examples,
        expected_batch_size=args.expected_batch_size,
        clipping_norm=args.representation_clipping_norm
        if only_rows
        else args.per_example_max_grad_norm,
        num_train_epochs=args.num_train_epochs,
        max_steps=args.max_steps,
        target_epsilon=args.target_epsilon,
        noise_multiplier=args.noise_multiplier,
        target_delta=args.target_delta,
        accountant=args.accountant or "pld",
        prior_events=spent,
        forward=forward,
        clipping=args.clipping,
        max_batch_size=args.max_logical_batch_size,
        selection=None if choice is None else choice.plan(args.per_example_max_grad_norm),
    )
    epsilon((*spent, *plan.events()), plan.delta, plan.accountant)
    return plan


def earlier_entries(args: DPTrainingArguments, num_examples: int) -> list[LedgerEntry]:
    """What the ``earlier_runs`` released of these rows.

    Raises: LedgerError for a file that cannot be read, or that went back; InvalidArgumentError for
        a run on another number of rows, or with another unit or relation: its claim and this one's
        have nothing in common.
    """
    entries = []
    for path in args.earlier_runs:
        record = _whole_run(path)
        plan = record.plan
        if plan.num_examples != num_examples:
            raise invalid(
                "earlier_runs",
                path,
                f"to be a run on the same {num_examples} rows, not on {plan.num_examples}",
                "A run on other rows costs these nothing: leave it out.",
            )
        for name in ("privacy_unit", "neighboring_relation"):
            theirs, ours = getattr(plan, name), getattr(args, name)
            if theirs != ours:
                raise invalid(
                    "earlier_runs",
                    path,
                    f"to be a run with {name}={ours!r}, not {theirs!r}",
                    f"No bound is known for both together. Set {name}={theirs!r} here, too.",
                )
        entries += [LedgerEntry(entry.event, EARLIER) for entry in record.ledger.entries]
    return entries


def _whole_run(path: str) -> PrivacyRecord:
    """Return what a run released; named by one of its checkpoints, also what it released after
    that."""
    record, parent = read_run(path), Path(path).resolve().parent
    if (
        Path(path).resolve().name.startswith(PREFIX_CHECKPOINT_DIR)
        and (parent / FILE_NAME).exists()
    ):
        run = read_run(parent)
        if run.run_id == record.run_id:
            return run
    return record


def earlier_claims(args: DPTrainingArguments) -> tuple[EarlierRun, ...]:
    """What the ``earlier_runs``, and the runs that they name in turn, leave unprotected.

    Raises: LedgerError for a file that cannot be read, or that went back.
    """
    return each_once(
        claim for path in args.earlier_runs for claim in EarlierRun.all_of(_whole_run(path))
    )
