"""Scale, then privatize: gradients are scaled as Adam would scale them, before they are clipped and
noised (Ganesh, McMahan, Thakurta 2025, arXiv 2507.01129).

What an example adds is w s g, with public scales s and w = min(1, C / |s g|). The optimizer gets
the noised sum divided by s: ``sum w g + N(0, (sigma C)^2) / s``. The sensitivity is C in the norm
|s .|, in which sum and noise are released; in the plain norm it can be C / min s, of which nothing
is claimed. s is 1 in the first step, and then 1 / sqrt(v), with v the moving averages of squares of
the noised gradients before, over rows and over columns of each parameter (as in Adafactor, arXiv
1804.04235); limited to be at most :data:`SPREAD`^3 times apart, with the root mean square 1.
"""

from __future__ import annotations

from dataclasses import replace

from hf_dp import _validate
from hf_dp.plans.mechanism import Words

BETA = "gradient_scaling_beta"  # the argument

SPREAD = 10.0  # how far apart scales may be within rows, within columns, between parameters


def check_beta(name: str, value: object) -> float:
    """Return the decay of the moving averages, in (0, 1). Raises: InvalidArgumentError."""
    return _validate.in_unit_interval(name, value, "0.95 averages about 20 steps.")


def scaled(plain: Words, beta: float) -> Words:
    """Return how a statement speaks of it. Args: plain: how it does of plain gradients."""
    said = (
        "Before it is clipped, each gradient is multiplied by scales, one for each number, a "
        f"function of the noised gradients of earlier steps (decay {beta!r}); the norm is that of "
        "the scaled gradient, and the noised sum is divided by the scales"
    )
    name, mechanism = f"{plain.name} with scaled gradients", f"{plain.mechanism}. {said}"
    return replace(plain, name=name, mechanism=mechanism)
