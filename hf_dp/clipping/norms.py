"""The norm of each example's gradient over all trainable parameters, never trusted below its rounding error."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from hf_dp.clipping.uses import Use, cross_term

# Largest relative rounding error of a squared norm that is accepted; half of it reaches the norm.
_TOLERANCE = 1e-4


def example_norms(uses: dict[nn.Parameter, list[Use]], examples: int) -> Tensor:
    """L2 norms (b,) over all parameters in ``uses``; zeros when nothing was used.

    A Gram sum can cancel: a true squared norm of 0.75 has come out as -0.72 in float32, and an example taken for small
    is left unclipped. So where the rounding error could exceed ``_TOLERANCE`` of an example's squared norm, the
    parameters responsible are computed again for that example from its explicit gradient in float64.
    """
    if not uses:
        return torch.zeros(examples)
    parts = [_squared_norm(of_parameter) for of_parameter in uses.values()]
    squared = torch.stack([part[0] for part in parts])  # (parameters, b)
    error = torch.stack([part[1] for part in parts])
    total = squared.sum(0)
    doubtful = (error.sum(0) > _TOLERANCE * total) & torch.isfinite(total)
    if bool(doubtful.any()):
        share = _TOLERANCE / len(parts)
        for index in doubtful.nonzero().flatten().tolist():
            for row, (parameter, of_parameter) in enumerate(uses.items()):
                if bool(error[row, index] > share * total[index].clamp_min(0)):
                    gradient = sum(use.example_gradient(index, parameter.shape) for use in of_parameter)
                    assert isinstance(gradient, Tensor)
                    squared[row, index] = gradient.square().sum().to(squared.dtype)
        total = squared.sum(0)
    return total.clamp_min(0).sqrt()


def _squared_norm(uses: list[Use]) -> tuple[Tensor, Tensor]:
    """``|sum_u G_u|^2 = sum_u |G_u|^2 + 2 sum_{u<v} <G_u, G_v>`` for each example, and its rounding error."""
    squared, error = uses[0].squared_norms()
    for use in uses[1:]:
        more, more_error = use.squared_norms()
        squared, error = squared + more, error + more_error
    for one, other in itertools.combinations(uses, 2):
        more, more_error = cross_term(one, other)
        squared, error = squared + 2 * more, error + 2 * more_error
    return squared, error
