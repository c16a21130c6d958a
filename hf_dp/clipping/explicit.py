"""One example's gradient at a time: formed, used and dropped.

For what has no Gram form: 1-norms (DP-FROST). The numbers that were measured are the numbers that
are added, so no rounding of another summation order comes between norm and sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hf_dp.clipping.gradients import Lookups, PerExampleGradient, accumulation_dtype


def explicit(
    uses: Sequence[PerExampleGradient], parameter: nn.Parameter, index: int
) -> tuple[Tensor | None, Tensor]:
    """One example's gradient: (None, all of it), or for lookups alone (the rows that are not zero,
    them)."""
    dtype = accumulation_dtype(parameter.dtype)
    first, *others = uses
    if isinstance(first, Lookups) and not others:
        here = slice(index, index + 1)
        _, rows, values = Lookups(first.tokens[here], first.grads[here]).rows(dtype)
        return rows, values
    gradient = first.example_gradient(index, parameter.shape, dtype)
    for use in others:
        gradient = gradient + use.example_gradient(index, parameter.shape, dtype)
    return None, gradient


def representable(weights: Tensor) -> Tensor:
    """Weights without those that float32 holds with few digits only, or none: a rounded one could
    exceed its bound.

    (Of gradients with norms above about 1e37 times the clipping norm. Such an example is left out.)
    """
    return torch.where(
        weights < torch.finfo(torch.float32).tiny, torch.zeros_like(weights), weights
    )


def accumulate(
    totals: dict[nn.Parameter, Tensor],
    parameter: nn.Parameter,
    rows: Tensor | None,
    values: Tensor,
    dtype: torch.dtype | None = None,
) -> None:
    """Add what :func:`explicit` returned, or a function of its values, to the running total of a
    parameter.

    Args: dtype: of a new total; default float32, or float64 for a float64 parameter.
    """
    if parameter not in totals:
        dtype = dtype or accumulation_dtype(parameter.dtype)
        totals[parameter] = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
    values = values.to(totals[parameter].dtype)
    if rows is None:
        totals[parameter].add_(values)
    else:
        totals[parameter].view(len(parameter), -1).index_add_(0, rows, values)
