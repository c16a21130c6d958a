"""One example's gradient at a time: formed, used and dropped.

This serves norms without a Gram form, such as 1-norms (DP-FROST). The numbers that are measured are
the numbers that are added, so no difference in summation order comes between norm and sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hf_dp.clipping.gradients import Lookups, PerExampleGradient
from hf_dp.clipping.rounding import accumulation_dtype


def explicit(
    uses: Sequence[PerExampleGradient], parameter: nn.Parameter, index: int
) -> tuple[Tensor | None, Tensor]:
    """Return one example's gradient as (rows, values).

    For lookups alone these are the rows of the parameter that were looked up and their values;
    otherwise None and the whole gradient.
    """
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
    """Return the weights with those below float32's normal range set to zero.

    Float32 holds those with few digits or none, and a rounded weight could exceed its bound. They
    belong to gradients with norms above about 1e37 C; such an example is left out.
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
    """Add what :func:`explicit` returned, or a function of it, to a parameter's running total.

    Args:
        dtype: of a new total; by default float32, or float64 for a float64 parameter.
    """
    if parameter not in totals:
        dtype = dtype or accumulation_dtype(parameter.dtype)
        totals[parameter] = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
    values = values.to(totals[parameter].dtype)
    if rows is None:
        totals[parameter].add_(values)
    else:
        totals[parameter].view(len(parameter), -1).index_add_(0, rows, values)
