"""Positions: all dimensions between the example dimension and the feature dimensions."""

from __future__ import annotations

from torch import Tensor


def positions(tensor: Tensor, feature_dims: int = 1) -> Tensor:
    """Return (b, ..., features) as (b, T, d); T = 1 if there is no dimension between."""
    if tensor.dim() == 3 and feature_dims == 1:
        return tensor
    split = tensor.dim() - feature_dims
    return tensor.reshape(
        tensor.shape[0], tensor.shape[1:split].numel(), tensor.shape[split:].numel()
    )
