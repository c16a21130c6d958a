"""The products that norms and sums are made of, each exact to float32 sums on every device.

Factors of 16 bits are widened first, which is exact, so none of torch's switches for products of 16
bits reaches a norm or a sum. :func:`hf_dp.clipping.rounding.full_precision` turns those off that
would shorten factors of 32 bits.

**Norms from Gram matrices.** For ``G = sum_t left_t right_t^T``,
``|G|^2 = sum_{s,t} (left_s . left_t)(right_s . right_t)`` (Li et al., section 4, eq. 3), so the sum
need not be formed. :mod:`hf_dp.clipping.rounding` derives the error bounds. The Gram matrices of b
examples' vectors (b, T, d), ``vectors[s] . vectors[t]``, take ``2 b T^2 d`` flops, or half of that
where their symmetry is used: no block is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_dp.clipping.rounding import NEGLIGIBLE, Norms, accumulation_dtype, unit

# A product of few vectors (fewer than 12 where this was measured) runs in kernels that add up the
# features one by one. They lost 5e-4 over 256,000 features, 1e-5 over 3,072 and 3e-6 over 1,024.
# So products of fewer than _FEW vectors are computed over _MANY_FEATURES features at a time.
_FEW, _MANY_FEATURES = 16, 1024


def dots(one: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``one[i, s] . other[i, t]``, (b, S, T), of vectors (b, S, d) and (b, T, d).

    The result has the given dtype, float32 or float64.
    """
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

    The factors are (b, T, m) and (b, T, n); a total is changed in place.
    """
    dtype = accumulation_dtype(left.dtype)
    left, right = left.to(dtype).mT, right.to(dtype)
    return torch.bmm(left, right) if total is None else total.baddbmm_(left, right)


Result = TypeVar("Result")


class LastOf(Generic[Result]):
    """A function of vectors and a dtype that remembers its last result, not to be changed in place.

    Query, key and value projections read the same input, and so do gate and up projections.
    """

    def __init__(self, function: Callable[[Tensor, torch.dtype], Result]):
        self._function = function
        self._key: object = None
        self._vectors: Tensor | None = None  # held, so that no other tensor gets its address
        self._result: Result

    def __call__(self, vectors: Tensor, dtype: torch.dtype) -> Result:
        place = vectors.data_ptr(), vectors.shape, vectors.stride(), vectors.dtype
        key = (*place, vectors._version, dtype)
        if self._vectors is None or key != self._key:
            self._result = self._function(vectors, dtype)
            self._key, self._vectors = key, vectors
        return self._result


Grams = LastOf[list[Tensor]]  # of :func:`gram_blocks`

# Gram matrices are symmetric: those of even length are halved, so that only one of the two mixed
# blocks is computed. Products below this length are too small to run at full speed (a GPU needs
# larger ones).
_SMALLEST_HALVED = {"cpu": 64, "cuda": 512}


def gram_blocks(vectors: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return the blocks of ``vectors[s] . vectors[t]``, (b, T, T), that symmetry leaves.

    These are the mixed blocks, which count twice, and the blocks on the diagonal, which come last.
    Each halving gives one mixed block, the product of the second half with the first; then the two
    halves of each example continue as two examples of half the length. Vectors of zeros fill up to
    lengths at which products are fast; they add nothing.
    """
    vectors = vectors.to(dtype)  # once for all blocks
    length = vectors.shape[1]
    halvings = 0
    while length >> halvings > _SMALLEST_HALVED.get(vectors.device.type, 64):
        halvings += 1
    missing = -length % (4 << halvings)
    # Measured: 13 vectors are slower than 16, but one vector beyond any other multiple of 4 is no
    # slower than padding to the next one.
    if missing and (halvings or length == 13 or (length > 12 and missing <= 2)):
        vectors = F.pad(vectors, (0, 0, 0, missing))
    blocks = []
    for _ in range(halvings):
        half = vectors.shape[1] // 2
        blocks.append(dots(vectors[:, half:], vectors[:, :half], dtype))
        vectors = vectors.reshape(2 * len(vectors), half, -1)
    return [*blocks, dots(vectors, vectors, dtype)]


def sum_of_blocks(blocks: Sequence[Tensor], examples: int) -> Tensor:
    """Return the sum of all entries, (examples,), of matrices as :func:`gram_blocks` lists them."""
    *mixed, total = (block.view(examples, -1).sum(1) for block in blocks)
    for each in mixed:
        total = total.add(each, alpha=2)
    return total


# Pairs of Gram matrices up to this total size are reduced together: an operation on small matrices
# takes less time than starting it.
_TOGETHER = 2**18  # numbers


def outer_norms(
    factors: Iterable[tuple[Tensor, Tensor]], grams: Grams | None = None
) -> list[Norms]:
    """Return the norms of each sum of outer products, in order.

    The factors are left (b, T, m) and right (b, T, n); ``grams`` remembers the last right one's
    Gram matrix. A few pairs of matrices (b, T, T) are held at once.
    """
    grams = LastOf(gram_blocks) if grams is None else grams
    found: list[Norms] = []
    waiting: list[GramPair] = []
    for left, right in factors:
        dtype = accumulation_dtype(left.dtype)
        of_right = grams(right, dtype)
        pair = GramPair(gram_blocks(left, dtype), of_right, max(left.shape[2], right.shape[2]))
        numbers = (len(waiting) + 1) * sum(block.numel() for block in pair.left)
        if waiting and not (waiting[0].alike(pair) and numbers <= _TOGETHER):
            found += norms_from_grams(waiting)
            waiting = []
        waiting.append(pair)
    return found + norms_from_grams(waiting) if waiting else found


@dataclass
class GramPair:
    """The Gram matrices of both factors, as blocks of (b, T, T), and the wider one's features."""

    left: list[Tensor]
    right: list[Tensor]  # possibly shared with other pairs
    features: int

    def alike(self, other: GramPair) -> bool:
        """Return whether both can be stacked."""
        last, also = self.left[-1], other.left[-1]
        same = last.shape == also.shape and last.dtype == also.dtype and last.device == also.device
        return same and len(self.left) == len(other.left)


def norms_from_grams(pairs: Sequence[GramPair]) -> list[Norms]:
    """Return the norms of pairs of the same length; overwrites their left blocks."""
    lefts = _stacked([pair.left for pair in pairs])
    rights = _stacked([pair.right for pair in pairs])
    count = len(lefts[0])  # one for each pair and example
    of_left, of_right = (
        blocks[-1].diagonal(dim1=1, dim2=2).reshape(count, -1) for blocks in (lefts, rights)
    )
    trace = of_left * of_right
    limits = torch.finfo(trace.dtype)
    lost = (of_left.sum(1) + of_right.sum(1)).mul_(
        limits.tiny * max(pair.features for pair in pairs) * trace.shape[1]
    )
    # terms[s, t] = (left_s . left_t)(right_s . right_t)
    terms = [left.mul_(right) for left, right in zip(lefts, rights, strict=True)]
    squared = sum_of_blocks(terms, count)
    magnitude = sum_of_blocks([block.abs_() for block in terms], count)
    error = unit(trace.dtype) * (magnitude + trace.sum(1)) + F.threshold(lost, NEGLIGIBLE, 0.0)
    slack = unit(trace.dtype) * trace.sqrt_().sum(1)
    by_pair = (result.view(len(pairs), -1).unbind() for result in (squared, error, slack))
    return [Norms(*of_pair) for of_pair in zip(*by_pair, strict=True)]


def _stacked(pairs: Sequence[list[Tensor]]) -> list[Tensor]:
    """Return the blocks (b, T, T) of each pair as blocks of (pairs * b, T, T)."""
    if len(pairs) == 1:
        return pairs[0]
    return [torch.stack(level).flatten(0, 1) for level in zip(*pairs, strict=True)]
