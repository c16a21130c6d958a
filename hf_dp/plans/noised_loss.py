"""DP-SGD whose steps also release the noised sum of the losses of the same draw."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from hf_dp import _validate
from hf_dp.accounting import LOSS, SumAndLoss, TruncatedSumAndLoss
from hf_dp.errors import InvalidArgumentError
from hf_dp.plans.dp_sgd import DpSgdPlan
from hf_dp.plans.mechanism import Schedule, Words, register_plan, rows_not_known
from hf_dp.plans.units import Users

BOUND, RATIO = "noised_loss_bound", "noised_loss_budget_ratio"
_LARGEST_BOUND = 1e30  # near the ends of float32 a loss is not computed any more


@register_plan
@dataclass(frozen=True, kw_only=True)
class NoisedLossPlan(DpSgdPlan):
    """Noise on the sum of clipped gradients, and on that of clipped losses, over one Poisson draw.

    The two sums are one Gaussian mechanism (:class:`hf_dp.accounting.SumAndLoss`). Its budget is
    divided in the terms in which it adds up, 1 / noise_multiplier^2: the losses get
    ``noised_loss_budget_ratio`` of it, the gradients the rest. A ``noise_multiplier`` that is given
    is that of the gradients; that of the losses follows, and costs extra.

    Args:
        noised_loss_bound: B > 0. Each loss is clipped to [0, B]; one that is not finite counts 0.
        noised_loss_budget_ratio: in (0, 1).
        others: as in :class:`DpSgdPlan`.

    Raises: InvalidArgumentError.
    """

    noised_loss_bound: float
    noised_loss_budget_ratio: float

    name: ClassVar[str] = "dp_sgd_noised_loss"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, BOUND, loss_bound(BOUND, self.noised_loss_bound))
        object.__setattr__(self, RATIO, budget_ratio(RATIO, self.noised_loss_budget_ratio))

    @property
    def loss_noise_multiplier(self) -> float:
        """Standard deviation of the noise on the sum of losses / their bound."""
        return self._of_losses(self.sigma)

    def noised_loss_std(self, schedule: Schedule) -> float:
        """Return the standard deviation of the noise in one step's noised mean loss."""
        return self.loss_noise_multiplier * self.noised_loss_bound / schedule.expected_batch_size

    def loss_unit(self, schedule: Schedule) -> float:
        """Return the power of two of which each clipped loss is made a multiple before it is added.

        The losses of all N examples are together less than 2^53 such units, so their sum is exact
        in float64, in whatever order and in however many parts it is formed: one example moves it
        by at most B, and adding rounds nothing. What the forward rounds is not covered: the losses
        of examples that regroup may change by that (made-up logits of 1e7 moved the sum by 4 B).
        """
        above = math.frexp(self.noised_loss_bound)[1] + schedule.num_examples.bit_length()
        return math.ldexp(1.0, above - 53)  # N < 2^bits and B < 2^exponent: N B < 2^above

    def check_users(self, users: Users) -> None:
        if users.by_row:
            raise rows_not_known("a noised loss")

    def step_event(
        self, schedule: Schedule, noise_multiplier: float, steps: int
    ) -> SumAndLoss | TruncatedSumAndLoss:
        rate, losses = self.sample_rate(schedule), self._of_losses(noise_multiplier)
        if self.max_batch_size is None:
            return SumAndLoss(noise_multiplier, losses, rate, steps)
        return TruncatedSumAndLoss(
            noise_multiplier, losses, rate, steps, schedule.num_examples, self.max_batch_size
        )

    def sensitivities(self, schedule: Schedule) -> Mapping[str, float]:
        return {**super().sensitivities(schedule), LOSS: self.noised_loss_bound}

    def words(self, schedule: Schedule) -> Words:
        words = super().words(schedule)
        bound, event = self.noised_loss_bound, self.step_event(schedule, self.sigma, 1)
        of_same = (
            "The losses of the same rows"
            if schedule.users is None
            else f"The losses of the same draw, the mean over the rows of each {schedule.one}"
        )
        return replace(
            words,
            name="DP-SGD and a noised loss",
            mechanism=(
                f"{words.mechanism}. {of_same}, each clipped to [0, {bound!r}], are summed, too; "
                "Gaussian noise with standard deviation "
                f"{event.loss_noise_multiplier:.6g} x {bound!r} is added once to their sum, which "
                "is divided by the expected batch size and logged as noised_loss. Each step's two "
                "sums are accounted together, as one with noise multiplier "
                f"{event.joint_noise_multiplier:.6g}"
            ),
            proof=(
                f"Poisson sampling, {schedule.clipping_in_words} of gradients and losses, and "
                "Gaussian noise on both sums, composed over the steps in the ledger"
            ),
            also_covered="the noised losses in its logs, and whatever is computed from them",
        )

    def _of_losses(self, noise_multiplier: float) -> float:
        ratio = self.noised_loss_budget_ratio
        return noise_multiplier * math.sqrt((1 - ratio) / ratio)


def half_given(missing: str, given: str) -> InvalidArgumentError:
    """Return the error for one of the two arguments without the other; the caller raises it."""
    return _validate.invalid(
        missing,
        None,
        f"to be given with `{given}`",
        "A noised loss needs both; for none, remove both.",
    )


def loss_bound(name: str, value: object) -> float:
    """Return the bound of one example's loss, a number above 0. Raises: InvalidArgumentError."""
    bound = _validate.positive(name, value, "It is public: choose it without looking at the rows.")
    if not 1 / _LARGEST_BOUND <= bound <= _LARGEST_BOUND:
        raise _validate.invalid(
            name, value, "to be from 1e-30 to 1e30", "Losses are computed in float32."
        )
    return bound


def budget_ratio(name: str, value: object) -> float:
    """Return the part of the budget that goes to the loss. Raises: InvalidArgumentError."""
    return _validate.in_unit_interval(name, value, "A hundredth is enough for a curve.")
