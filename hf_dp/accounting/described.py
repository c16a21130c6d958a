"""What every event has: a description to read back, and the relations that it holds for."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Self

# What an event releases with noise: a sum over examples, vectors of one example each, or the sum of
# the examples' losses.
SUM, VECTORS, LOSS = "sum", "vectors", "loss"


class Described:
    """Base of the events, which are frozen dataclasses.

    Class attributes:
        relations: those of :data:`hf_dp.accounting.RELATIONS` under which the analysis holds.
        restriction: why it does not hold under the others; empty if it holds under all.
        reasons: why no bound on its epsilon is established; empty where there is one.
        unestablished: how a sentence names it then.
        several_forwards: whether one step noises vectors in several forward passes.
        paid_ahead: whether it is recorded before the first of several steps, which it all pays for.
    """

    relations: ClassVar[tuple[str, ...]] = ("zero_out", "add_remove", "replace_one")
    restriction: ClassVar[str] = ""
    reasons: ClassVar[tuple[str, ...]] = ()
    unestablished: ClassVar[str] = ""
    several_forwards: ClassVar[bool] = False
    paid_ahead: ClassVar[bool] = False

    @property
    def established(self) -> bool:
        """Whether a bound on its epsilon is known at all."""
        return not self.reasons

    @property
    def noise_multipliers(self) -> dict[str, float]:
        """The noise multiplier of each part that is released with Gaussian noise: of :data:`SUM`,
        :data:`VECTORS` and :data:`LOSS` those that there are."""
        return {SUM: self.noise_multiplier}  # type: ignore[attr-defined]

    def with_steps(self, steps: int) -> Self:
        """Return the event of so many steps of the same kind, or of the fewest whole allocations
        that have them."""
        return dataclasses.replace(self, steps=steps)  # type: ignore[type-var]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready description that :func:`hf_dp.accounting.event_from_dict` reads."""
        return {"type": type(self).__name__, **dataclasses.asdict(self)}  # type: ignore[call-overload]


def joint_noise_multiplier(*noise_multipliers: float) -> float:
    """Return 1 / mu of several Gaussian mechanisms on one example, which are one together: its mu^2
    is the sum of theirs."""
    if 0 in noise_multipliers:
        return 0.0
    return 1 / math.hypot(*(1 / sigma for sigma in noise_multipliers))
