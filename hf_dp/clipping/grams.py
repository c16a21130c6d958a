"""Gram matrices of records, ``records[s] . records[t]``: what of them has to be computed, and when
it is known already.

A matrix of the records (b, T, d) of b examples takes ``2 b T^2 d`` flops, and half of that where
its symmetry is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

# Gram matrices are symmetric: those of even length are halved, so that only one of the two mixed
# blocks is computed. Below this length a product is too small to run at full speed (a GPU needs
# larger ones).
_SMALLEST_HALVED = {"cpu": 64, "cuda": 512}
# A product of few rows runs in kernels that add up their features one by one (below 12 rows where
# this was measured): over 256,000 of them 5e-4 was lost, over 3,072 1e-5, over 1,024 3e-6. So
# products of fewer rows go by so many features at once.
_FEW_ROWS, _MANY_FEATURES = 16, 1024

Result = TypeVar("Result")


class LastOf(Generic[Result]):
    """A function of records and a dtype that knows its last result: query, key and value, or gate
    and up projection, read the same input. Results must not be changed in place."""

    def __init__(self, function: Callable[[Tensor, torch.dtype], Result]):
        self._function = function
        self._key: object = None
        self._records: Tensor | None = None  # held, so that its address stays its own
        self._result: Result

    def __call__(self, records: Tensor, dtype: torch.dtype) -> Result:
        key = (
            records.data_ptr(),
            records.shape,
            records.stride(),
            records.dtype,
            records._version,
            dtype,
        )
        if self._records is None or key != self._key:
            self._result = self._function(records, dtype)
            self._key, self._records = key, records
        return self._result


Grams = LastOf[list[Tensor]]  # of :func:`gram_blocks`


def products(one: Tensor, other: Tensor) -> Tensor:
    """``one[s] . other[t]`` of records (b, S, d) and (b, T, d): (b, S, T)."""
    features = one.shape[2]
    if features <= _MANY_FEATURES or min(one.shape[1], other.shape[1]) >= _FEW_ROWS:
        return torch.bmm(one, other.mT)
    total = torch.bmm(one[..., :_MANY_FEATURES], other[..., :_MANY_FEATURES].mT)
    for start in range(_MANY_FEATURES, features, _MANY_FEATURES):
        part = slice(start, start + _MANY_FEATURES)
        total.baddbmm_(one[..., part], other[..., part].mT)
    return total


def gram_blocks(records: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Of ``records[s] . records[t]``, (b, T, T), what symmetry leaves: mixed blocks, which count
    twice, and the last ones.

    Halving: the product of the second half with the first is one mixed block; then both halves of
        all examples go on as twice
    as many examples of half the length. Rows of zeros fill up to lengths at which products are
    fast; they add nothing.
    """
    records = records.to(dtype)
    length = records.shape[1]
    halvings = 0
    while length >> halvings > _SMALLEST_HALVED.get(records.device.type, 64):
        halvings += 1
    missing = -length % (4 << halvings)
    # Measured: 13 rows are slower than 16, but one row beyond another multiple of 4 is no slower
    # than padding it.
    if missing and (halvings or length == 13 or (length > 12 and missing <= 2)):
        records = F.pad(records, (0, 0, 0, missing))
    blocks = []
    for _ in range(halvings):
        half = records.shape[1] // 2
        blocks.append(products(records[:, half:], records[:, :half]))
        records = records.reshape(2 * len(records), half, -1)
    return [*blocks, products(records, records)]


def sum_of_blocks(blocks: Sequence[Tensor], examples: int) -> Tensor:
    """Of symmetric matrices as :func:`gram_blocks` orders them: the sum of all entries,
    (examples,)."""
    *mixed, total = (block.view(examples, -1).sum(1) for block in blocks)
    for each in mixed:
        total = total.add(each, alpha=2)
    return total
