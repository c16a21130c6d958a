"""The products that norms and sums are made of, each exact to float32 sums on every device.

Factors of 32 or 64 bits are multiplied as they are, under
:func:`hf_dp.clipping.rounding.full_precision`. Factors of 16 bits are widened first, which is
exact, or multiplied by tensor cores that sum in float32 (:mod:`hf_dp.clipping.tensor_cores`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_dp.clipping import tensor_cores
from hf_dp.clipping.rounding import accumulation_dtype

# A product of few vectors (fewer than 12 where this was measured) runs in kernels that add up the
# features one by one. They lost 5e-4 over 256,000 features, 1e-5 over 3,072 and 3e-6 over 1,024.
# So products of fewer than _FEW vectors are computed over _MANY_FEATURES features at a time.
_FEW, _MANY_FEATURES = 16, 1024


def dots(one: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``one[i, s] . other[i, t]``, (b, S, T), of vectors (b, S, d) and (b, T, d).

    Args:
        dtype: of the result, float32 or float64.
    """
    if tensor_cores.take(one, other):
        return tensor_cores.product(one.mT[:, None], other.mT[:, None], _ones(one))
    one, other = one.to(dtype), other.to(dtype)
    features = one.shape[2]
    if features <= _MANY_FEATURES or min(one.shape[1], other.shape[1]) >= _FEW:
        return torch.bmm(one, other.mT)
    total = torch.bmm(one[..., :_MANY_FEATURES], other[..., :_MANY_FEATURES].mT)
    for start in range(_MANY_FEATURES, features, _MANY_FEATURES):
        part = slice(start, start + _MANY_FEATURES)
        total.baddbmm_(one[..., part], other[..., part].mT)
    return total


def outer_sums(left: Tensor, right: Tensor, total: Tensor | None = None) -> Tensor:
    """Return ``total[i] + sum_t left[i, t] right[i, t]^T``, (b, m, n), in float32 or better.

    Args:
        left, right: (b, T, m) and (b, T, n).
        total: (b, m, n); changed in place.
    """
    if tensor_cores.take(left, right):
        return tensor_cores.product(left[:, None], right[:, None], _ones(left), total)
    dtype = accumulation_dtype(left.dtype)
    left, right = left.to(dtype).mT, right.to(dtype)
    return torch.bmm(left, right) if total is None else total.baddbmm_(left, right)


def _ones(factors: Tensor) -> Tensor:
    return torch.ones(len(factors), 1, dtype=torch.float32, device=factors.device)
