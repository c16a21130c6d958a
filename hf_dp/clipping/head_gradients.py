"""Gradients of a language model's head, without the logits of a batch.

The head's gradient is ``G_i = sum_t left_t right_t^T``, with left_t the gradient of the logits of
position t, V numbers, and right_t the head's input. Left factors are never held: each block of the
vocabulary is formed again from the input, whenever it is needed. Their Gram matrices are sums over
blocks, so norms need one pass, which is that of the backward pass; the weighted sum needs another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_dp.clipping.gradients import OuterProducts, PerExampleGradient, Weights
from hf_dp.clipping.grams import Grams, norms_from_grams
from hf_dp.clipping.products import dots
from hf_dp.clipping.rounding import Norms, accumulation_dtype, full_precision

# Tokens in a block. It must not depend on the batch: in bfloat16 each block's product is rounded,
# so an example's gradient would depend on how many others are beside it.
_WIDTH = 4096


@dataclass
class _Block:
    """Logits of some tokens, (b, T, width), and where the labels lie among them."""

    rows: slice
    logits: Tensor
    index: Tensor  # (b, T, 1), inside the block also for labels outside
    inside: Tensor  # (b, T, 1)


def logits_by_blocks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    wanted: slice | None = None,
) -> Iterator[_Block]:
    """Yield the logits of one block of tokens after the other; only those with wanted tokens.

    They are the same numbers each time, whatever autocast or TF32 setting surrounds the call: what
    is added to a sum must be what was measured.
    """
    vocabulary = len(weight)
    for start in range(0, vocabulary, _WIDTH):
        rows = slice(start, min(start + _WIDTH, vocabulary))
        if wanted is not None and (rows.stop <= wanted.start or wanted.stop <= rows.start):
            continue
        with torch.autocast(hidden.device.type, enabled=False), full_precision():
            logits = F.linear(
                hidden,
                weight[rows].to(hidden.dtype),
                None if bias is None else bias[rows].to(hidden.dtype),
            )
        index = (labels - start)[..., None]
        inside = (index >= 0) & (index < rows.stop - start)
        index = index.clamp(0, rows.stop - start - 1)
        yield _Block(rows, logits.to(accumulation_dtype(hidden.dtype)), index, inside)


@dataclass
class LogitGradients:
    """Form the gradients of the logits of b examples, block by block.

    Attributes:
        hidden: the head's inputs, (b, T, d).
        lse: log of the sum of exponentials, (b, T).
        scale: what each position's loss counts, (b, T, 1); 0 where nothing is predicted.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    lse: Tensor
    scale: Tensor

    def by_blocks(self, wanted: slice | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows of the vocabulary with the gradients of their logits, (b, T, rows)."""
        unlabeled = self.scale == 0
        for block in logits_by_blocks(self.hidden, self.weight, self.bias, self.labels, wanted):
            grads = block.logits.sub_(self.lse[..., None]).exp_()
            grads.scatter_add_(-1, block.index, -block.inside.to(grads.dtype))
            # As in a backward pass under autocast: rounded, once, to what the products take.
            yield (
                block.rows,
                grads.mul_(self.scale).masked_fill_(unlabeled, 0).to(self.hidden.dtype),
            )


class LeftGrams:
    """The Gram matrices of left factors, (b, T, T), summed over blocks of the vocabulary."""

    def __init__(self, hidden: Tensor):
        self._dtype = accumulation_dtype(hidden.dtype)
        examples, positions, _ = hidden.shape
        # Hundreds of blocks: their sum must not lose what each of them has.
        self._total = hidden.new_zeros(examples, positions, positions, dtype=torch.float64)

    def add(self, grads: Tensor) -> None:
        """Add a block, (b, T, rows)."""
        with full_precision():
            self._total += dots(grads, grads, self._dtype)

    def total(self) -> Tensor:
        """Return the matrices, in float32 or better."""
        return self._total.to(self._dtype)


@dataclass
class HeadGradients(PerExampleGradient):
    """Sums of outer products whose left factors are formed again by blocks of the vocabulary.

    Args:
        logits: gives the left factors; its inputs are the right ones.
        gram: the left factors' Gram matrices, (b, T, T).
    """

    form = "factors by blocks"
    logits: LogitGradients
    gram: Tensor
    keep: Tensor | None = None

    def fits(self, shape: torch.Size, examples: int) -> bool:
        return shape == self.logits.weight.shape and len(self.gram) == examples

    def factors(self, wanted: slice | None = None) -> Iterator[tuple[slice, OuterProducts]]:
        """Yield rows of the weight with the outer products that make their gradients."""
        for rows, left in self.logits.by_blocks(wanted):
            part = OuterProducts(left, self.logits.hidden)
            if self.keep is not None:
                part.keep_only(self.keep)
            yield rows, part

    def norms(self, grams: Grams | None = None) -> Norms:
        hidden = self.logits.hidden
        of_right = dots(hidden, hidden, accumulation_dtype(hidden.dtype))
        return norms_from_grams(self.gram.clone(), of_right, max(self.logits.weight.shape))

    def add_weighted_sum(self, total: Tensor, weights: Weights) -> None:
        for rows, part in self.factors():
            part.add_weighted_sum(total[rows], weights)

    def size(self) -> Tensor:
        right = torch.linalg.vector_norm(self.logits.hidden, dim=2, dtype=self.gram.dtype)
        return torch.linalg.vecdot(self._left_norms(), right)

    def _left_norms(self) -> Tensor:
        return self.gram.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()

    def left_at(self, tokens: Tensor) -> Tensor:
        """Return the left factors at some tokens of each example, (b, T, S), for tokens (b, S)."""
        index = tokens[:, None, :].expand(-1, self.gram.shape[1], -1)
        found = torch.zeros(index.shape, dtype=self.gram.dtype, device=self.gram.device)
        for rows, part in self.factors():
            inside = (index >= rows.start) & (index < rows.stop)
            picked = part.left.gather(2, (index - rows.start).clamp(0, part.left.shape[2] - 1))
            found = torch.where(inside, picked.to(found.dtype), found)
        return found

    def block(self, examples: slice, rows: slice, dtype: torch.dtype) -> Tensor:
        blocks = []
        for here, part in self.factors(rows):  # of all examples, so that the numbers are the same
            start, stop = max(here.start, rows.start), min(here.stop, rows.stop)
            inside = slice(start - here.start, stop - here.start)
            blocks.append(part.block(examples, inside, dtype))
        return torch.cat(blocks, 1)

    def fingerprint(self) -> Tensor:
        left = torch.linalg.vector_norm(self._left_norms(), dim=1)
        return left * torch.linalg.vector_norm(self.logits.hidden, dim=(1, 2))

    def keep_only(self, keep: Tensor) -> None:
        self.keep = keep if self.keep is None else self.keep & keep
