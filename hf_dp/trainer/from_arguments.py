"""From the user's arguments to what a run works with: its mechanism, plan and options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_dp.accounting import epsilon
from hf_dp.batches.loader import BatchOptions
from hf_dp.batches.units import UnitTable
from hf_dp.errors import ConfigError
from hf_dp.plans.dp_fp import DP_FP
from hf_dp.plans.dp_sgd import DP_SGD, DpSgdPlan
from hf_dp.plans.mechanism import MechanismPlan
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.plans.units import BY_ROW, USER
from hf_dp.run.earlier import earlier_entries
from hf_dp.run.options import RunOptions
from hf_dp.trainer.forward_arguments import forward_plan
from hf_dp.trainer.row_arguments import users_of
from hf_dp.tuners.base import Tuner

# (training arguments, number of the model's classes) -> plan
PlanOfArguments = Callable[[Any, int | None], MechanismPlan]


def gradient_plan(args: Any, num_classes: int | None) -> DpSgdPlan:
    """Return the plan of ``privacy_mode="dp_sgd"``."""
    return DpSgdPlan.of(
        args.per_example_max_grad_norm,
        args.noise_multiplier,
        args.clipping,
        sampling=args.sampling,
        max_batch_size=args.max_logical_batch_size,
        by_row=args.privacy_unit == USER and args.unit_sampling == BY_ROW,
        noised_loss_bound=args.noised_loss_bound,
        noised_loss_budget_ratio=args.noised_loss_budget_ratio,
        mean_runs=args.private_selection_mean_runs,
    )


MODES: dict[str, PlanOfArguments] = {DP_SGD: gradient_plan, DP_FP: forward_plan}


def register_mode(name: str, plan: PlanOfArguments) -> None:
    """Let ``DPTrainingArguments(privacy_mode=name)`` select a mechanism.

    Raises: ConfigError for a name that is taken.
    """
    if MODES.setdefault(name, plan) is not plan:
        raise ConfigError(f"Expected a privacy_mode of its own, got {name!r}, which is taken.")


def plan_of(
    args: Any,
    num_examples: int,
    tuner: Tuner,
    num_classes: int | None = None,
    units: UnitTable | None = None,
) -> PrivacyPlan:
    """Return the plan for DPTrainingArguments.

    Args: num_examples: rows, or users. units: whose the rows are, where users are protected.

    Raises: InvalidArgumentError, CalibrationError; AccountingRangeError for an accountant that
        cannot describe it, here and not after the training.
    """
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
        users=users_of(args, units),
    )
    epsilon((*spent, *plan.events()), plan.delta, plan.accountant)
    return plan


def options_of(args: Any) -> RunOptions:
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
