"""Gram matrices of vectors, ``vectors[s] . vectors[t]``, without computing any block twice.

The matrices of b examples' vectors (b, T, d) take ``2 b T^2 d`` flops, or half of that where their
symmetry is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_dp.clipping import tensor_cores
from hf_dp.clipping.products import dots

# Gram matrices are symmetric: those of even length are halved, so that only one of the two mixed
# blocks is computed. Products below this length are too small to run at full speed (a GPU needs
# larger ones).
_SMALLEST_HALVED = {"cpu": 64, "cuda": 512}

Result = TypeVar("Result")


class LastOf(Generic[Result]):
    """A function of vectors and a dtype that remembers its last result.

    Query, key and value projections read the same input, and so do gate and up projections. Results
    must not be changed in place.
    """

    def __init__(self, function: Callable[[Tensor, torch.dtype], Result]):
        self._function = function
        self._key: object = None
        self._vectors: Tensor | None = None  # held, so that no other tensor gets its address
        self._result: Result

    def __call__(self, vectors: Tensor, dtype: torch.dtype) -> Result:
        key = (
            vectors.data_ptr(),
            vectors.shape,
            vectors.stride(),
            vectors.dtype,
            vectors._version,
            dtype,
        )
        if self._vectors is None or key != self._key:
            self._result = self._function(vectors, dtype)
            self._key, self._vectors = key, vectors
        return self._result


Grams = LastOf[list[Tensor]]  # of :func:`gram_blocks`


def gram_blocks(vectors: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return the blocks of ``vectors[s] . vectors[t]``, (b, T, T), that symmetry leaves.

    These are the mixed blocks, which count twice, and the blocks on the diagonal, which come last.
    Each halving gives one mixed block, the product of the second half with the first; then the two
    halves of each example continue as two examples of half the length. Vectors of zeros fill up to
    lengths at which products are fast; they add nothing.
    """
    if not tensor_cores.take(vectors):
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
