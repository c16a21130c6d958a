"""The range in which an accountant is known to be right.

Outside it the accountant refuses and names one that is right there.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_dp.accounting.composition import Composition
from hf_dp.errors import AccountingRangeError


@dataclass(frozen=True)
class Range:
    """Limits of one accountant, both ends included.

    Args:
        accountant: its name, for messages.
        min_noise_multiplier, max_noise_multiplier: noise standard deviation / clipping norm, of
            every event.
        min_sample_rate: Poisson probability, of every event.
        max_steps: steps of all events together.
        min_delta: delta.
        next_move: what a message advises.
    """

    accountant: str
    min_noise_multiplier: float
    max_noise_multiplier: float
    min_sample_rate: float
    max_steps: int
    min_delta: float
    next_move: str

    def check(self, composition: Composition, delta: float) -> None:
        """Raise AccountingRangeError, with value, limit and next move, for anything outside."""
        for sigma in composition.noise_multipliers:
            if not self.min_noise_multiplier <= sigma <= self.max_noise_multiplier:
                limits = f"[{self.min_noise_multiplier}, {self.max_noise_multiplier}]"
                raise self.error(f"`noise_multiplier` in {limits}, got {sigma!r}")
        for rate in composition.sample_rates:
            if rate < self.min_sample_rate:
                raise self.error(f"`sample_rate` >= {self.min_sample_rate}, got {rate!r}")
        if composition.steps > self.max_steps:
            raise self.error(f"at most {self.max_steps} `steps`, got {composition.steps}")
        if delta < self.min_delta:
            raise self.error(f"`delta` >= {self.min_delta}, got {delta!r}")

    def error(self, what: str, next_move: str = "") -> AccountingRangeError:
        """Return the error for one violated limit; the caller raises it."""
        return AccountingRangeError(
            f"Accountant {self.accountant!r} is known to be right for {what}. "
            f"{next_move or self.next_move}"
        )
