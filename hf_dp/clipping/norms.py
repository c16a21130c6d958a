"""The norm of each example's gradient over all trainable parameters, never trusted below its rounding error."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from hf_dp.clipping.uses import Norms, Use, cross_term

# Largest relative rounding error of a squared norm that is accepted; half of it reaches the norm.
_TOLERANCE = 1e-4


def example_norms(uses: dict[nn.Parameter, list[Use]], examples: int) -> tuple[Tensor, Tensor]:
    """L2 norms (b,) over all parameters in ``uses`` (zeros when nothing was used), and their slack (b,).

    Norm plus slack bounds what the example can contribute to a sum, rounding of the sum included: weights are taken from
    it. A Gram sum can cancel: a true squared norm of 0.75 has come out as -0.72 in float32, and an example taken for small
    is left unclipped. So where the rounding error could exceed ``_TOLERANCE`` of an example's squared norm, the parameters
    responsible are computed again for that example from its explicit gradient in float64.
    """
    if not uses:
        return torch.zeros(examples), torch.zeros(examples)
    parts = [_norms(of_parameter) for of_parameter in uses.values()]
    squared = torch.stack([part.squared for part in parts])  # (parameters, b)
    error = torch.stack([part.error for part in parts])
    slack = torch.stack([part.slack for part in parts]).square().sum(0).sqrt()
    total = squared.sum(0)
    doubtful = (error.sum(0) > _TOLERANCE * total.clamp_min(0)) & torch.isfinite(total) & torch.isfinite(error.sum(0))
    if bool(doubtful.any()):
        for index in doubtful.nonzero().flatten().tolist():
            _settle(list(uses.items()), squared[:, index], error[:, index], index)
        total = squared.sum(0)
    # Not finite in any part, -inf and an error too large to judge included: no norm, the example is removed.
    usable = torch.isfinite(total) & torch.isfinite(error.sum(0)) & torch.isfinite(slack)
    return torch.where(usable, total.clamp_min(0).sqrt(), torch.full_like(total, torch.inf)), slack


def _settle(uses: list[tuple[nn.Parameter, list[Use]]], squared: Tensor, error: Tensor, index: int) -> None:
    """Replace, in place, the most doubtful squared norms of one example until what is left of the error is small.

    One at a time: a large error can make the total look large, beside which a smaller one seems harmless.
    """
    while bool(error.sum() > _TOLERANCE * squared.sum().clamp_min(0)):
        row = int(error.argmax())
        parameter, of_parameter = uses[row]
        gradient = sum(use.example_gradient(index, parameter.shape) for use in of_parameter)
        assert isinstance(gradient, Tensor)
        squared[row] = gradient.square().sum().to(squared.dtype)
        error[row] = 0


def _norms(uses: list[Use]) -> Norms:
    """``|sum_u G_u|^2 = sum_u |G_u|^2 + 2 sum_{u<v} <G_u, G_v>`` for each example."""
    parts = [use.norms() for use in uses]
    squared, error = sum(p.squared for p in parts), sum(p.error for p in parts)
    for one, other in itertools.combinations(uses, 2):
        more, more_error = cross_term(one, other)
        squared, error = squared + 2 * more, error + 2 * more_error
    assert isinstance(squared, Tensor)
    assert isinstance(error, Tensor)
    slack = torch.stack([p.slack for p in parts]).sum(0)
    return Norms(squared, error, slack)
