"""Positions: whatever lies between the example dimension and the feature dimensions."""

from __future__ import annotations

from torch import Tensor


def positions(tensor: Tensor, feature_dims: int = 1) -> Tensor:
    """(b, ..., features) as (b, T, d): everything between counts as positions, T = 1 when there is
    nothing between."""
    if tensor.dim() == 3 and feature_dims == 1:
        return tensor
    split = tensor.dim() - feature_dims
    return tensor.reshape(
        tensor.shape[0], tensor.shape[1:split].numel(), tensor.shape[split:].numel()
    )
