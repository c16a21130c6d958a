"""From the user's arguments to what a run works with: a checked copy, the plan, the options."""

from __future__ import annotations

import copy

from hf_dp._validate import invalid
from hf_dp.accounting import epsilon
from hf_dp.batches.loader import BatchOptions
from hf_dp.batches.units import UnitTable
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.run.earlier import earlier_entries
from hf_dp.run.options import RunOptions
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.privacy_modes import MODES
from hf_dp.trainer.unit_arguments import users_of
from hf_dp.tuners.base import Tuner


def own_copy(
    args: object, arguments_class: type[DPTrainingArguments] = DPTrainingArguments
) -> DPTrainingArguments:
    """Return a checked copy of the arguments: steps are written into it, and the caller's stay free
    and may serve another run.

    Raises: InvalidArgumentError for arguments of another class than this trainer's.
    """
    if not isinstance(args, arguments_class):
        name, given = arguments_class.__name__, type(args).__name__
        theirs = "TrainingArguments" if args is None else given
        raise invalid(
            "args",
            given,
            f"to be {name}",
            f"Replace {theirs}(...) by {name}(..., target_epsilon=3, expected_batch_size=1024).",
        )
    copied = copy.copy(args)
    for name, value in vars(args).items():
        if isinstance(value, (list, dict)):  # which the caller may change in place
            setattr(copied, name, copy.deepcopy(value))
    copied.hub_token = args.hub_token  # a copy, like a pickle, goes without it
    copied.check()
    return copied


def plan_of(
    args: DPTrainingArguments,
    num_examples: int,
    tuner: Tuner,
    num_classes: int | None = None,
    units: UnitTable | None = None,
) -> PrivacyPlan:
    """Return the plan for these arguments.

    Args: num_examples: rows, or users. units: whose the rows are, where users are protected.

    Raises: InvalidArgumentError, CalibrationError; AccountingRangeError for an accountant that
        cannot describe it, here and not after the training.
    """
    users = users_of(args, units)
    earlier = earlier_entries(
        args.earlier_runs, num_examples, args.privacy_unit, args.neighboring_relation, units
    )
    spent = tuple(entry.event for entry in earlier)
    plan = PrivacyPlan.solve(
        num_examples=num_examples,
        expected_batch_size=args.expected_batch_size,
        mechanism=MODES[args.privacy_mode](args, num_classes),
        num_train_epochs=args.num_train_epochs,
        max_steps=args.max_steps,
        target_epsilon=args.target_epsilon,
        target_delta=args.target_delta,
        accountant=args.accountant or "pld",
        selection=tuner.plan(args.per_example_max_grad_norm),
        prior_events=spent,
        privacy_unit=args.privacy_unit,
        neighboring_relation=args.neighboring_relation,
        users=users,
    )
    epsilon((*spent, *plan.events()), plan.delta, plan.accountant)
    return plan


def options_of(args: DPTrainingArguments) -> RunOptions:
    """Return the options of a run that do not change what epsilon means."""
    return RunOptions(
        batches=BatchOptions(
            physical_batch_size=args.per_device_train_batch_size,
            max_tokens=args.max_tokens_per_physical_batch,
            quiet=bool(args.disable_tqdm),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
        ),
        clipping_strategy=args.clipping_strategy,
        clipping_memory_ratio=args.clipping_memory_ratio,
        representation_module=args.representation_module,
        padding_values=args.padding_values,
        rows_are_chunks=args.rows_are_chunks,
        adapter_init_data_is_public=args.adapter_init_data_is_public,
        other_training=args.other_training,
    )


# Concern one process alone: what it prints, and which one it is.
_OWN = {"local_rank", "disable_tqdm", "log_level", "log_level_replica"}


def shared_arguments(args: DPTrainingArguments) -> dict[str, object]:
    """Return the arguments that all processes of a run must have in common."""
    return {name: value for name, value in args.to_dict().items() if name not in _OWN}
