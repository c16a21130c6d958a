"""Products of bfloat16 factors on tensor cores, summed in float32 as exactly as norms need.

Products of two bfloat16 numbers are exact in float32, so norms and sums need float32 sums and no
float32 factors. A GPU multiplies bfloat16 matrices some 15 times as fast as float32 ones. But its
tensor cores do not round sums as IEEE 754 says. The model that is assumed here is the one that was
measured for NVIDIA's (Fasi, Higham, Mikaitis and Pranesh 2021, "Numerical behavior of NVIDIA tensor
cores"): one step adds 8 products (16 on later ones) to the accumulator, all are shifted to the
largest exponent among them, and bits below the 24th are cut off, as are those of the sum. Cut, not
rounded: errors of terms of one sign add up, and over thousands of terms they exceed what
:mod:`hf_dp.clipping.rounding` allows for.

So no more than ``TERMS`` products are summed by the tensor cores. Each such partial sum is
multiplied by its example's weight and added to the total by ordinary float32 arithmetic. Under the
model a partial sum is off by 15 eps of the sum of its magnitudes at most
(tests/clipping/test_tensor_cores.py), less than the ``unit`` of 32 eps. No more than ``PARTS`` of
them are added in float32, of which each rounds by eps / 2 of the sum at most: PARTS / 4 eps in all
for terms of one size. What is longer is added up in float64.

A partial sum never holds terms of two examples. So what an example adds is a function of this
example alone, and no weight need be rounded to bfloat16 or split.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

# Terms of one partial sum. Fewer are safer; a sum outside the tensor cores takes about a quarter of
# the time of 64 terms within.
TERMS = 64
PARTS = 64  # partial sums that are added in float32
_LARGEST = 2**31  # numbers of one group of factors, whose places are 32-bit integers


def take(*factors: Tensor) -> bool:
    """Return whether :func:`product` multiplies these factors.

    They must be bfloat16 and lie on an NVIDIA GPU with tensor cores for them (Ampere or later), and
    Triton must be installed.
    """
    return (
        all(each.dtype == torch.bfloat16 and each.is_cuda for each in factors)
        and all(each.shape[1:].numel() < _LARGEST for each in factors)
        and _has_them(factors[0].device.index)
    )


@cache
def _has_them(device: int) -> bool:
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        import triton  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except ImportError:
        return False
    return True


def product(one: Tensor, other: Tensor, weights: Tensor, total: Tensor | None = None) -> Tensor:
    """Return ``sum_g weights[z, g] sum_k one[z, g, k, i] other[z, g, k, j]``, float32 (Z, I, J).

    Args:
        one: bfloat16, (Z, G, K, I), of any strides.
        other: bfloat16, (Z, G, K, J), of any strides.
        weights: float32, (Z, G).
        total: float32, (Z, I, J); to be added to in place.
    """
    pieces = list(_pieces(*one.shape[1:3]))
    if len(pieces) == 1:
        return piece(one, other, weights, total)
    shape = len(one), one.shape[3], other.shape[3]
    wide = torch.zeros(shape, dtype=torch.float64, device=one.device)
    for groups, terms in pieces:
        wide += piece(one[:, groups, terms], other[:, groups, terms], weights[:, groups])
    return wide.float() if total is None else total.add_(wide)


def _pieces(groups: int, terms: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of groups and of terms with no more than PARTS partial sums each."""
    at_once = min(max(terms, 1), PARTS * TERMS)
    together = max(1, PARTS // -(-at_once // TERMS))
    for group in range(0, max(groups, 1), together):
        for term in range(0, max(terms, 1), at_once):
            yield slice(group, group + together), slice(term, term + at_once)


def piece(one: Tensor, other: Tensor, weights: Tensor, total: Tensor | None = None) -> Tensor:
    """Return a :func:`product` that is one launch of the kernel, summed in float32."""
    from hf_dp.clipping.tensor_core_kernel import launch

    if total is not None and total.is_contiguous() and total.dtype == torch.float32:
        launch(one, other, weights, total, add=True, terms=TERMS)
        return total
    out = torch.empty(
        len(one), one.shape[3], other.shape[3], dtype=torch.float32, device=one.device
    )
    launch(one, other, weights, out, add=False, terms=TERMS)
    return out if total is None else total.add_(out)
