"""Norms of sums of outer products from Gram matrices, without forming the sums.

For ``G = sum_t left_t right_t^T``, ``|G|^2 = sum_{s,t} (left_s . left_t)(right_s . right_t)``
(Li et al., section 4, eq. 3). :mod:`hf_dp.clipping.rounding` derives the error bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_dp.clipping.grams import Grams, LastOf, gram_blocks, sum_of_blocks
from hf_dp.clipping.rounding import NEGLIGIBLE, Norms, accumulation_dtype, unit

Factors = tuple[Tensor, Tensor]  # left (b, T, m) and right (b, T, n)

# Pairs of Gram matrices up to this total size are reduced together: an operation on small matrices
# takes less time than starting it.
_TOGETHER = 2**18  # numbers


def outer_norms(factors: Iterable[Factors], grams: Grams | None = None) -> list[Norms]:
    """Return the norms of each sum of outer products, in order.

    A few pairs of matrices (b, T, T) are held at once.

    Args:
        grams: a memory of the last right factor's Gram matrix, to be shared between calls.
    """
    grams = LastOf(gram_blocks) if grams is None else grams
    found: list[Norms] = []
    waiting: list[_GramPair] = []
    for left, right in factors:
        dtype = accumulation_dtype(left.dtype)
        of_right = grams(right, dtype)
        pair = _GramPair(gram_blocks(left, dtype), of_right, max(left.shape[2], right.shape[2]))
        if waiting and not (
            waiting[0].alike(pair) and (len(waiting) + 1) * pair.numbers() <= _TOGETHER
        ):
            found += _reduced(waiting)
            waiting = []
        waiting.append(pair)
    return found + _reduced(waiting) if waiting else found


@dataclass
class _GramPair:
    """The Gram matrices of both factors, as blocks of (b, T, T), and the wider one's features."""

    left: list[Tensor]
    right: list[Tensor]  # possibly shared with other pairs
    features: int

    def alike(self, other: _GramPair) -> bool:
        """Return whether both can be stacked."""
        last, also = self.left[-1], other.left[-1]
        same = last.shape == also.shape and last.dtype == also.dtype and last.device == also.device
        return same and len(self.left) == len(other.left)

    def numbers(self) -> int:
        """Count the numbers in the left blocks."""
        return sum(block.numel() for block in self.left)


def _reduced(pairs: Sequence[_GramPair]) -> list[Norms]:
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


def norms_from_grams(left: Tensor, right: Tensor, features: int) -> Norms:
    """Return the norms of b sums of outer products from both factors' Gram matrices, (b, T, T).

    Args:
        left: overwritten.
        features: of the wider factor.
    """
    (found,) = _reduced([_GramPair([left], [right], features)])
    return found


def _stacked(pairs: Sequence[list[Tensor]]) -> list[Tensor]:
    """Return the blocks (b, T, T) of each pair as blocks of (pairs * b, T, T)."""
    if len(pairs) == 1:
        return pairs[0]
    return [torch.stack(level).flatten(0, 1) for level in zip(*pairs, strict=True)]
