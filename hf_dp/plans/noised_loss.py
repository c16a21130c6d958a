"""The noised sum of the losses of a draw, which a step of DP-SGD releases beside its gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hf_dp import _validate
from hf_dp.accounting import LOSS
from hf_dp.accounting.event import joint_noise_multiplier
from hf_dp.accounting.knows import LOSS as KIND
from hf_dp.accounting.knows import Asked
from hf_dp.errors import InvalidArgumentError
from hf_dp.plans.schedule import Schedule
from hf_dp.plans.words import Words

BOUND, RATIO = "noised_loss_bound", "noised_loss_budget_ratio"
_LARGEST_BOUND = 1e30  # near the ends of float32 a loss is not computed any more


@dataclass(frozen=True)
class NoisedLoss:
    """Noise on the sum of clipped losses, over the draw whose gradients are summed.

    The two sums are one Gaussian mechanism. Its budget is divided in the terms in which it adds up,
    1 / noise_multiplier^2: the losses get ``budget_ratio`` of it, the gradients the rest. A
    ``noise_multiplier`` that is given is that of the gradients; that of the losses follows, and
    costs extra.

    Args:
        bound: B > 0. Each loss is clipped to [0, B]; one that is not finite counts 0.
        budget_ratio: in (0, 1).

    Raises: InvalidArgumentError.
    """

    bound: float
    budget_ratio: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "bound", loss_bound(BOUND, self.bound))
        object.__setattr__(self, "budget_ratio", budget_ratio(RATIO, self.budget_ratio))

    @classmethod
    def of(cls, bound: float | None, budget_ratio: float | None) -> NoisedLoss | None:
        """Return it for the two arguments, None for none of them. Raises: InvalidArgumentError."""
        if bound is None and budget_ratio is None:
            return None
        if bound is None:
            raise half_given(BOUND, RATIO)
        if budget_ratio is None:
            raise half_given(RATIO, BOUND)
        return cls(bound, budget_ratio)

    @property
    def asked(self) -> Asked:
        """What a user set to get it, for a refusal."""
        return Asked(KIND, BOUND, self.bound)

    @property
    def sensitivities(self) -> Mapping[str, float]:
        """How far one example can move the sum."""
        return {LOSS: self.bound}

    def part(self, noise_multiplier: float) -> Mapping[str, float]:
        """Return the noise multiplier of the losses beside this one of the gradients."""
        return {LOSS: noise_multiplier * math.sqrt((1 - self.budget_ratio) / self.budget_ratio)}

    def std(self, schedule: Schedule, noise_multiplier: float) -> float:
        """Return the standard deviation of the noise in one step's noised mean loss."""
        return self.part(noise_multiplier)[LOSS] * self.bound / schedule.expected_batch_size

    def unit(self, schedule: Schedule) -> float:
        """Return the power of two of which each clipped loss is made a multiple before it is added.

        The losses of all N examples are together less than 2^53 such units, so their sum is exact
        in float64, in whatever order and in however many parts it is formed: one example moves it
        by at most B, and adding rounds nothing. What the forward rounds is not covered: the losses
        of examples that regroup may change by that (made-up logits of 1e7 moved the sum by 4 B).
        """
        above = math.frexp(self.bound)[1] + schedule.num_examples.bit_length()
        return math.ldexp(1.0, above - 53)  # N < 2^bits and B < 2^exponent: N B < 2^above

    def words(self, alone: Words, schedule: Schedule, noise_multiplier: float) -> Words:
        """Return how a statement speaks of both sums. Args: alone: how it does of the gradients."""
        losses = self.part(noise_multiplier)[LOSS]
        of_same = "The losses of the same rows"
        if schedule.users is not None:
            of_same = f"The losses of the same draw, the mean over the rows of each {schedule.one}"
        return replace(
            alone,
            name=f"{alone.name} and a noised loss",
            mechanism=(
                f"{alone.mechanism}. {of_same}, each clipped to [0, {self.bound!r}], are summed, "
                f"too; Gaussian noise with standard deviation {losses:.6g} x {self.bound!r} is "
                "added once to their sum, which is divided by the expected batch size and logged "
                "as noised_loss. Each step's two sums are accounted together, as one with noise "
                f"multiplier {joint_noise_multiplier(noise_multiplier, losses):.6g}"
            ),
            also_covered="the noised losses in its logs, and whatever is computed from them",
        )


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
