"""An epsilon and its kind: a proven upper bound or an estimate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import Literal, get_args

from hf_dp._validate import one_of
from hf_dp.errors import InvalidArgumentError

Kind = Literal["bound", "estimate", "not established"]
LARGEST_DELTA = 1e-3
KINDS: tuple[Kind, ...] = get_args(Kind)


def round_up(value: float, digits: int = 3) -> float:
    """Return the smallest number with ``digits`` decimals that is not below ``value``.

    Infinity, and a number too large to have decimals, is returned as it is. A printed epsilon is
    rounded up so that the sentence "this run is (epsilon, delta)-DP" stays true. The rounding is
    done in decimal on the shortest form of the float: 2.41 stays 2.41 although its binary value is
    a little above.
    """
    # Larger floats are whole numbers, and soon longer than a decimal of 28 digits.
    if not abs(value) < 2**53:
        return value
    return float(
        Decimal(repr(float(value))).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_CEILING)
    )


def doubt_of_delta(delta: float) -> str:
    """Return why a delta is too large to protect anybody, with a next move; empty if it is not."""
    if delta <= LARGEST_DELTA:
        return ""
    return (
        f"delta is {delta:.3g}, above {LARGEST_DELTA:g}: with about that probability the guarantee "
        "fails altogether. Set a delta (target_delta) far below 1 / the number of rows, such as "
        "1e-5."
    )


@dataclass(frozen=True)
class Epsilon:
    """The result of an accountant.

    Args:
        value: epsilon >= 0, possibly infinite.
        kind: "bound" if the events are (value, delta)-DP; "estimate" if the value may be below the
            true epsilon; "not established" if it follows from assumptions that do not hold for what
            ran (DP-FP as published).
        estimate: the accountant's point estimate beside its bound (``prv`` has one), or None.
    """

    value: float
    kind: Kind
    estimate: float | None = None

    def __post_init__(self) -> None:
        one_of("kind", self.kind, KINDS)
        if math.isnan(self.value) or self.value < 0:
            raise InvalidArgumentError(f"Expected an epsilon >= 0, got {self.value!r}.")
        # Never a numpy scalar: the value is printed and written to JSON.
        object.__setattr__(self, "value", float(self.value))

    def rounded_up(self, digits: int = 3) -> float:
        """Return ``value`` as it is printed: rounded up, never to nearest."""
        return round_up(self.value, digits)
