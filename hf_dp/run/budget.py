"""What a run may still release: further steps and selections that stay inside its target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from hf_dp.accounting import (
    BOUNDS,
    SELECTION,
    TRAINING,
    Event,
    Ledger,
    LedgerEntry,
    calibrate_steps,
    epsilon,
)
from hf_dp.errors import BudgetExceededError, LedgerError
from hf_dp.plans.privacy import PrivacyPlan


class Budget:
    """What one run may still spend, by its plan and its ledger, which is read and never changed."""

    def __init__(self, plan: PrivacyPlan, ledger: Ledger):
        self.plan, self.ledger = plan, ledger
        self._allowed = math.inf
        self._reserved = 0  # releases of selections to come, which training must leave room for
        self._goal: int | None = None  # training steps in the ledger when this process is done

    def start(self, planned_steps: int, planned_releases: int = 0) -> None:
        """Plan further training steps, and releases of selections between them, or raise
        BudgetExceededError when not one step fits under the target."""
        done = self.ledger.steps(TRAINING)
        self._reserved = planned_releases
        self._goal = done + planned_steps
        self._allowed = self.allowed_steps(planned_steps)
        if self._allowed <= done and planned_steps > 0:
            spent = self.ledger.epsilon(self.plan.delta, self.plan.accountant).rounded_up()
            raise BudgetExceededError(
                f"This run has spent epsilon {spent} of target_epsilon={self.plan.target_epsilon} "
                f"in {self.ledger.steps()} steps; one more would exceed it. Publish what there is, "
                "or start a new run with a new output_dir (both then count together)."
            )

    def allowed_steps(self, planned_steps: int) -> float:
        """Return the most training steps in the ledger that stay within the target, or infinity."""
        plan, done = self.plan, self.ledger.steps(TRAINING)
        if plan.target_epsilon is None or not plan.releases_each_step:
            return math.inf
        if plan.accountant not in BOUNDS:
            # DP-FP as published: steps beyond those of its figure would not have that figure.
            return plan.steps
        # Steps to come continue the ledger's last entry if that is of steps, too, and are one event
        # with it: further steps of the same search, or of the same turn of the parts. After another
        # release they are a second one.
        entries = self.ledger.entries
        ran = entries[-1].event.steps if entries and self._is_step(entries[-1]) else 0
        others = tuple(each.event for each in (entries[:-1] if ran else entries))
        if self._reserved and plan.selection is not None:
            others = (*others, plan.selection.event(self._reserved))
        if done + planned_steps <= plan.steps and self._is_as_planned(
            others, ran + plan.steps - done
        ):
            return plan.steps
        if self._passes(others if ran == 0 else (*others, plan.event(ran))):
            return done
        fit = calibrate_steps(
            plan.target_epsilon,
            plan.delta,
            plan.noise_multiplier,
            plan.sample_rate,
            plan.accountant,
            prior_events=others,
            event=partial(plan.mechanism.step_event, plan),
        )
        return done + max(0, fit - ran)

    @property
    def exhausted(self) -> bool:
        """Whether the next training step would pass the target."""
        return self.left < 1

    @property
    def left(self) -> float:
        """How many training steps may still be made inside the target, infinity without one."""
        return max(0, self._allowed - self.ledger.steps(TRAINING))

    def check(self, *entries: LedgerEntry) -> None:
        """Raise BudgetExceededError when releasing all these would pass the target."""
        is_step = any(map(self._is_step, entries))
        if is_step and self._goal is None:
            raise LedgerError(
                "No step was planned in this process. Start the run first: "
                "`mechanism.logical_batches()` or `DPTrainer.train()` does."
            )
        if self.exhausted if is_step else self._would_pass(entries):
            raise BudgetExceededError(
                f"The next step of {entries[0].purpose} would exceed "
                f"target_epsilon={self.plan.target_epsilon} after {self.ledger.steps()} steps."
            )

    def released(self, entry: LedgerEntry) -> None:
        """Note that it is in the ledger: less may be left to train with than before."""
        if self._is_step(entry):
            return
        self._reserved = max(0, self._reserved - entry.event.steps)
        if self._goal is not None:
            self._allowed = self.allowed_steps(self._goal - self.ledger.steps(TRAINING))

    def _is_step(self, entry: LedgerEntry) -> bool:
        return entry.purpose == TRAINING and self.plan.makes(entry)

    def _is_as_planned(self, others: tuple[Event, ...], steps: int) -> bool:
        """Return whether the plan's steps fit, as it was calibrated. What the plan does not make
        (of earlier runs, say) may have been left out then, so with that it is computed."""
        plan = self.plan
        planned = 0 if plan.selection is None else plan.selection.iterations
        if self.ledger.steps(SELECTION) + self._reserved > planned:
            return False
        known = all(plan.makes(entry) for entry in self.ledger.entries)
        if known or self.ledger.steps(TRAINING) >= plan.steps:
            return True
        return not self._passes((*others, plan.event(steps)))

    def _would_pass(self, entries: Sequence[LedgerEntry]) -> bool:
        return self._passes((*self.ledger.events, *(entry.event for entry in entries)))

    def _passes(self, events: tuple[Event, ...]) -> bool:
        plan, target = self.plan, self.plan.target_epsilon
        return target is not None and epsilon(events, plan.delta, plan.accountant).value > target
