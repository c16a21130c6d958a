"""How far a computed norm or sum can be from the true one.

Every norm comes with a bound on its rounding error and with one on the rounding of the clipped sum
(:class:`Norms`). Both count in units u = ``unit(dtype)``.

The Gram form (:mod:`hf_dp.clipping.products`) sums ``T * T`` signed terms, which can cancel to a
result far smaller than the terms (Li et al., section 4, does not treat this). Its ``error`` is
``u (S + D)``. S is the sum of the terms' magnitudes: errors of large entries are proportional to
them. D is ``sum_t |left_t|^2 |right_t|^2``: errors of small entries are independent, of size
``eps |left_s||left_t||right_s||right_t|``, and add up like a random walk.

Squares of numbers as small as 1e-20 are lost to underflow, even where the other factor is large
enough to compensate. An entry of a Gram matrix of d features loses at most ``d tiny``, and the sum
of terms ``d tiny sum_{s,t} |r_s . r_t| <= d tiny T sum_t |r_t|^2``, with r the other factor.
``error`` includes this loss, for both factors, where it could matter to a clipping norm.

The clipped sum adds the same ``left_t right_t^T``. Where they cancel, its rounding can exceed their
sum. ``slack = u sum_t |left_t||right_t|`` bounds it and is added to the norm before the weight is
computed. That of a dense gradient is ``u`` times its norm, for its addition to those of others. One
that was formed from outer products keeps their slack: which form a gradient gets depends on the
batch, and the weight of an example must not.

Where an example's terms cancel entirely, to 1e-7 of their size, what is left of it is rounding, and
this differs between forms, kernels and neighbors. So the slack bounds the weight by itself, too
(:func:`hf_dp.plans.rounding.slack_cap`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# The smallest C that the engine accepts, and an error that is negligible beside its square.
SMALLEST_CLIPPING_NORM = 1e-9
NEGLIGIBLE = 1e-4 * SMALLEST_CLIPPING_NORM**2
# Blocked float sums of some thousand terms are accurate to a few eps: 18 at most in tests/clipping.
_ROUNDING = 32.0
_BLOCK = 1024  # numbers whose norm is taken at once


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of norms and sums: float32, or float64 for a float64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def matmul_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a matrix product on ``x`` runs under the current autocast.

    Autocast does not reach the operations in the backward of a custom autograd function.
    """
    on = torch.is_autocast_enabled(x.device.type)
    if on and x.is_floating_point() and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def unit(dtype: torch.dtype) -> float:
    """Return u, the relative rounding error allowed for a sum in this dtype."""
    return _ROUNDING * torch.finfo(dtype).eps


def zero_sum(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return zeros of the type of sums over physical batches: float64.

    A sum must not depend on its history. A row that is left out changes which batches follow which;
    in float32 the rounding of 2,596 additions differed by 1.39 C.
    """
    return torch.zeros(tuple(shape), dtype=torch.float64, device=device)


# What torch lets products of float32 matrices round to, by kind of device.
_PRODUCTS: dict[str, Any] = {
    "cuda": torch.backends.cuda.matmul,
    "cpu": torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
}


def product_precision(device: str) -> str:
    """Return what products of float32 matrices round their factors to on a kind of device.

    This is ``"float32"``, ``"tf32"`` (10 bits) or ``"bf16"`` (7 bits), whichever of torch's
    functions set it.
    """
    found = _PRODUCTS[device].fp32_precision if device in _PRODUCTS else "none"
    return "float32" if found in ("none", "ieee") else str(found)


@contextmanager
def full_precision() -> Iterator[None]:
    """Form norms and sums in true float32 inside, and restore what was set outside.

    TF32 products round to 1e-3, far more than the error that the norms allow for. What forward and
    backward round is another matter: it makes the gradients other ones, and these are bounded.
    """
    kept = {device: _PRODUCTS[device].fp32_precision for device in _PRODUCTS}
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # set by torch.backends, of which the older function knows nothing
        before = None
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if before is not None:
            torch.set_float32_matmul_precision(before)
        for device, value in kept.items():
            products = _PRODUCTS[device]
            if products.fp32_precision != value:
                products.fp32_precision = "none"  # what is set for all then holds, as before
                if products.fp32_precision != value:
                    products.fp32_precision = value


@dataclass
class Norms:
    """Squared norms of b examples; each field has shape (b,)."""

    squared: Tensor
    error: Tensor  # a bound on their rounding error
    slack: Tensor  # a bound on the rounding of what is added to the sum


def squared_norms(values: Tensor) -> Tensor:
    """Return the squared norms, (b,), of b vectors (b, n).

    They are computed in blocks: over 4e7 numbers, a float32 norm on the CPU loses 1.4 % of the
    squared norm.
    """
    if values.shape[1] <= _BLOCK:
        return torch.linalg.vector_norm(values, dim=1).square()
    blocks = values.shape[1] // _BLOCK
    whole = values[:, : blocks * _BLOCK].reshape(len(values), blocks, _BLOCK)
    norms = torch.linalg.vector_norm(whole, dim=2).double().square().sum(1)
    rest = torch.linalg.vector_norm(values[:, blocks * _BLOCK :], dim=1).double().square()
    return (norms + rest).to(values.dtype)
