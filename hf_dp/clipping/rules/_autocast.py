"""Casting inside a recorded layer: autocast does not reach the operations of a custom autograd
function's backward."""

from __future__ import annotations

import torch
from torch import Tensor


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which autocast would run a matrix product on ``x``: its own when autocast is
    off."""
    if (
        torch.is_autocast_enabled(x.device.type)
        and x.is_floating_point()
        and x.dtype != torch.float64
    ):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
