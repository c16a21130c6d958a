"""The kernel of :func:`hf_dp.clipping.tensor_cores.product`, written in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# The side of the square of results that one program computes. The larger one reads each factor half
# as often, and the smaller one keeps a GPU of 132 processors busy with small matrices.
_LARGE, _SMALL, _PROGRAMS = 128, 64, 264


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _product(  # type: ignore[no-untyped-def]  # Triton compiles annotations, too
    one,
    other,
    weights,
    out,
    groups,
    terms,
    height,
    width,
    one_z,
    one_g,
    one_k,
    one_i,
    other_z,
    other_g,
    other_k,
    other_j,
    ADD: tl.constexpr,
    SIDE: tl.constexpr,
    TERMS: tl.constexpr,
):
    """Compute one square of results of one z."""
    squares = tl.cdiv(width, SIDE)
    square, z = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = (square // squares) * SIDE + tl.arange(0, SIDE)
    j = (square % squares) * SIDE + tl.arange(0, SIDE)
    total = tl.zeros((SIDE, SIDE), tl.float32)
    parts = tl.cdiv(terms, TERMS)
    for part in range(groups * parts):
        group = (part // parts).to(tl.int64)
        k = (part % parts) * TERMS + tl.arange(0, TERMS)
        of_one = tl.load(
            one + z * one_z + group * one_g + i[:, None] * one_i + k[None, :] * one_k,
            mask=(i[:, None] < height) & (k[None, :] < terms),
            other=0.0,
        )
        of_other = tl.load(
            other + z * other_z + group * other_g + k[:, None] * other_k + j[None, :] * other_j,
            mask=(k[:, None] < terms) & (j[None, :] < width),
            other=0.0,
        )
        # A partial sum of its own, that the compiler cannot merge with the total: the weight, which
        # it does not know, stands between.
        weight = tl.load(weights + z * groups + group)
        total += tl.dot(of_one, of_other) * weight
    place = out + z * height * width + i[:, None] * width + j[None, :]
    inside = (i[:, None] < height) & (j[None, :] < width)
    if ADD:
        total += tl.load(place, mask=inside, other=0.0)
    tl.store(place, total, mask=inside)


def launch(one: Tensor, other: Tensor, weights: Tensor, out: Tensor, add: bool, terms: int) -> None:
    """Write the product to ``out``, or add it; arguments as those of ``product``.

    Args:
        terms: of a partial sum.
    """
    count, groups, summed, height = one.shape
    width = other.shape[3]

    def programs(side: int) -> tuple[int, int]:
        return triton.cdiv(height, side) * triton.cdiv(width, side), count

    large = programs(_LARGE)[0] * count >= _PROGRAMS
    side = _LARGE if large else _SMALL
    _product[programs(side)](
        one,
        other,
        weights.contiguous(),
        out,
        groups,
        summed,
        height,
        width,
        *one.stride(),
        *other.stride(),
        ADD=add,
        SIDE=side,
        TERMS=terms,
        num_warps=8 if large else 4,
        num_stages=3,
    )
