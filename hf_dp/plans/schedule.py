"""The numbers of a plan that draws and mechanisms read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_dp.accounting import Event, calibrate_noise_multiplier
from hf_dp.accounting.calibration import MakeEvent
from hf_dp.plans.units import Users


@dataclass(frozen=True)
class Schedule:
    """How much data, how often, and how it is accounted.

    Args:
        num_examples: N, the rows of the training set (the users, where they are protected), stated
            as public.
        expected_batch_size: B, the expected logical batch; also the divisor of the noisy sum.
        steps: optimizer steps.
        delta: of the (epsilon, delta) guarantee.
        accountant: the one that calibrates, and whose epsilon is the headline.
        target_epsilon: what the noise is calibrated to; None when the noise is given.
        users: whose rows are one unit, where users are protected. Where their rows are drawn one
            by one, ``expected_batch_size`` counts rows.
    """

    num_examples: int
    expected_batch_size: float
    steps: int
    delta: float
    accountant: str = field(default="pld", kw_only=True)
    target_epsilon: float | None = field(default=None, kw_only=True)
    users: Users | None = field(default=None, kw_only=True)

    @property
    def drawn_from(self) -> int:
        """How many users, or rows, a step draws from: N, or the rows of users that are drawn."""
        rows = None if self.users is None else self.users.num_rows
        return self.num_examples if rows is None else rows

    @property
    def one(self) -> str:
        """What one thing that is drawn is called: "row", or the name of a user."""
        return "row" if self.users is None or self.users.by_row else self.users.name

    def calibrated(
        self,
        target_epsilon: float,
        prior_events: Sequence[Event],
        sample_rate: float,
        event: MakeEvent,
    ) -> float:
        """Return the smallest noise multiplier with which all steps stay inside the target.

        Args: event: ``(noise_multiplier, steps)`` -> what that many steps release.

        Raises: CalibrationError, AccountingRangeError.
        """
        return calibrate_noise_multiplier(
            target_epsilon,
            self.delta,
            sample_rate,
            self.steps,
            accountant=self.accountant,
            prior_events=prior_events,
            event=event,
        )
