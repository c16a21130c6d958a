"""From per-example gradient norms to clipping weights."""

from __future__ import annotations

import torch
from torch import Tensor


def flat_weights(norms: Tensor, clipping_norm: float) -> Tensor:
    """``min(1, C / norm)`` for each example (Abadi et al. 2016; Li et al., algorithm 1).

    Guarantee: for a finite norm, ``weight * norm <= clipping_norm`` up to one rounding, so adding or removing one example
    moves the weighted sum by at most ``clipping_norm``: the sensitivity that the noise is scaled to.

    | norm        | weight |
    |-------------|--------|
    | 0           | 1      |
    | <= C        | 1      |
    | > C         | C/norm |
    | inf or NaN  | 0 (the caller also zeroes its records: 0 * NaN is NaN) |

    Args: norms: (b,), float. clipping_norm: C > 0, in the units of the norms. Returns: (b,).
    """
    weights = clipping_norm / norms.clamp_min(clipping_norm)
    return torch.where(torch.isfinite(norms), weights, torch.zeros_like(weights))
