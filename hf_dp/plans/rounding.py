"""How far rounding can move a sum beyond its clipping norm, so that noise is scaled to cover it."""

from __future__ import annotations

import math

# The least margin, in units of C, by which rounding may move a float32 sum beyond what is clipped
# to. It is one rounding of the sum over 2,048 aligned examples.
ROUNDING_MARGIN = 2.0**-12

# How many roundings of the whole sum are allowed for. One more example moves all others by one
# place, so products are added in another order. Measured, not derived: with 1,024 aligned examples
# of two kinds in turn, a sum moved by 2.6 roundings on a CPU with AVX-512, and by 0.1 on another
# (tests/clipping/test_sensitivity.py).
SUM_ROUNDINGS = 4.0

_ROUNDING = 2.0**-23  # of a float32 number, relative


def rounding_margin(expected_draw: float, most: float = math.inf) -> float:
    """Return the margin for sums over draws of ``expected_draw`` examples on average and ``most``
    at the most.

    Beside a sum of n aligned examples of norm C, float32 numbers are at most 2^-23 n C apart, so
    one example's part is rounded by no more.
    """
    return max(ROUNDING_MARGIN, _largest(expected_draw, most) * _ROUNDING)


def clipping_share(expected_draw: float, most: float = math.inf) -> float:
    """Return the share of C that gradients are clipped to, so that sums over such draws move by no
    more than C (1 + margin).

    A sum moves by what one gradient is clipped to and :data:`SUM_ROUNDINGS` roundings, each of
    2^-23 n C. Small draws (up to 512) have room for that in the margin, and their share is 1.
    """
    moved = 1 + SUM_ROUNDINGS * _largest(expected_draw, most) * _ROUNDING
    return min(1.0, (1 + rounding_margin(expected_draw, most)) / moved)


def _largest(expected_draw: float, most: float) -> float:
    """Return how large a draw can be.

    A Poisson draw exceeds its mean m by 12 sqrt(m) with a probability below exp(-60) (Bernstein,
    from m = 1,000 on, below which the constant is larger).
    """
    return min(most, expected_draw + 12 * math.sqrt(expected_draw))
