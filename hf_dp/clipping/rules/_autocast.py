"""Casting inside a layer with a rule.

Autocast does not reach the operations in the backward of a custom autograd function.
"""

from __future__ import annotations

import torch
from torch import Tensor


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a matrix product on ``x`` runs under the current autocast."""
    if (
        torch.is_autocast_enabled(x.device.type)
        and x.is_floating_point()
        and x.dtype != torch.float64
    ):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
