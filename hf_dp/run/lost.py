"""What a run lost when it broke off after its last checkpoint, and what that leaves to it."""

from __future__ import annotations

from collections.abc import Mapping

from hf_dp.accounting import Ledger, epsilon
from hf_dp.plans.privacy import PrivacyPlan


def recorded_since(before: Ledger, now: Ledger) -> dict[str, int]:
    """Count the releases by purpose that ``now`` holds and ``before``, which it extends, lacks."""
    purposes = dict.fromkeys(entry.purpose for entry in now.entries)
    counts = {purpose: now.steps(purpose) - before.steps(purpose) for purpose in purposes}
    return {purpose: count for purpose, count in counts.items() if count}


def lost_in_words(checkpoint: str, lost: Mapping[str, int]) -> str:
    """Say what a resumed run lost. Args: checkpoint: its name. lost: releases by purpose."""
    counts = " and ".join(f"{count:,} of {purpose}" for purpose, count in lost.items())
    return (
        f"Going on from {checkpoint}. The ledger records releases after it ({counts}): they are "
        "lost to the model, but spent all the same, and count towards epsilon."
    )


def outlook(plan: PrivacyPlan, ledger: Ledger, at_step: int, max_steps: int, left: float) -> str:
    """Say how a resumed run will end.

    Args:
        at_step: optimizer steps in the checkpoint.
        max_steps: for which number of steps the run, and its learning-rate schedule, were planned.
        left: how many steps may still be made inside the target; infinity without one.
    """
    wanted = max_steps - at_step
    made = int(min(wanted, left))
    events = (*ledger.events, *([plan.event(made)] if made else []))
    end = f"at step {at_step + made:,} of max_steps={max_steps:,}"
    if plan.mechanism.established:
        end += f", at epsilon {epsilon(events, plan.delta, plan.accountant).rounded_up()}"
    if left >= wanted:
        within = "" if plan.target_epsilon is None else f" inside {_target(plan)}"
        return f"The {wanted:,} steps that are left fit{within}: the run will end {end}."
    return (
        f"Of the {wanted:,} steps that are left, {made:,} may still be made inside "
        f"{_target(plan)}: the run will end before its planned end, {end}. The learning-rate "
        "schedule, which was made for all steps, breaks off there."
    )


def _target(plan: PrivacyPlan) -> str:
    return f"target_epsilon={plan.target_epsilon}"
