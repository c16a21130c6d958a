"""From the ``privacy_mode`` argument to the plan of a mechanism: one row a mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_dp.errors import ConfigError
from hf_dp.plans.dp_fp import DP_FP
from hf_dp.plans.dp_sgd import DP_SGD, DpSgdPlan
from hf_dp.plans.mechanism import MechanismPlan
from hf_dp.plans.units import BY_ROW, USER
from hf_dp.trainer.forward_arguments import forward_plan

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
    if MODES.get(name, plan) is not plan:
        raise ConfigError(f"Expected a privacy_mode of its own, got {name!r}, which is taken.")
    MODES[name] = plan
