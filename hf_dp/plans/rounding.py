"""How far rounding can move a sum beyond its clipping norm, so that noise is scaled to cover it."""

from __future__ import annotations

import math

# By how much, in units of C, rounding of float32 sums can move them beyond C when one example is
# added. Measured with 1,024 aligned examples: 1e-5 (tests/clipping/test_sensitivity.py). It covers
# a draw of 2,048.
ROUNDING_MARGIN = 2.0**-12


def rounding_margin(expected_draw: float, most: float = math.inf) -> float:
    """Return the margin for sums over draws of ``expected_draw`` examples on average and ``most``
    at the most.

    Beside a sum of n aligned examples of norm C, float32 numbers are at most 2^-23 n C apart, so
    one example's part is rounded by no more. A Poisson draw exceeds its mean m by 12 sqrt(m) with a
    probability below exp(-60) (Bernstein, from m = 1,000 on, below which the constant is larger).
    """
    largest = min(most, expected_draw + 12 * math.sqrt(expected_draw))
    return max(ROUNDING_MARGIN, largest * 2.0**-23)
