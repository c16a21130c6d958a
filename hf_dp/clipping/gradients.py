"""How a parameter was used: the per-example gradient of one parameter, in the cheapest exact form.

For example ``i`` every layer's gradient has one of three forms, with ``t`` running over the
positions of that example:

* outer products: ``G_i = sum_t left_it right_it^T``, parameter of shape (m, n) once its trailing
  dimensions are flattened. ``nn.Linear``: left = output gradient, right = input; GPT-2's ``Conv1D``
  (weight stored in x out): the other way round; ``nn.Conv2d``: left = output gradient, right = the
  patch under the kernel.
* lookups: ``G_i = sum_t onehot(token_it) grad_it^T``, parameter of shape (V, n), or (V,) with n =
    1.
* dense: the gradient itself, shape (b, *parameter.shape); for biases, norms and whatever is smaller
    than its records.

Two uses of one parameter (a reused layer, a tied embedding) add their gradients, so their norm
needs the inner product of every pair of uses, :func:`inner_product`; uses of which that is cheap to
do are joined into one.

Rounding (:class:`Norms`). The Gram form sums ``T * T`` signed terms, which can cancel to a result
far smaller than the terms (Li et al., section 4, does not treat this). With u = ``_ROUNDING * eps``
its ``error`` is ``u (S + D)``, S the sum of the terms' magnitudes (errors of large entries are
proportional to them) and D = ``sum_t |left_t|^2 |right_t|^2`` (errors of small entries are
independent, of size ``eps |left_s||left_t||right_s||right_t|``, and add up like a random walk).
Squares of numbers as small as 1e-20 are lost to underflow, also where the other factor is large
enough to make up for it: of d features an entry of a Gram matrix loses at most ``d tiny``, and the
sum of terms ``d tiny sum_{s,t} |r_s . r_t| <= d tiny T sum_t |r_t|^2``, r the other factor.
``error`` has this too, of both factors, where it could matter to a clipping norm. The clipped sum
itself adds the same ``left_t right_t^T``, and where they cancel its rounding can exceed their sum:
``slack = u sum_t |left_t||right_t|`` bounds that, and is added to the norm before the weight is
taken from it. A dense gradient has neither: the same tensor is squared for the norm and added to
the sum, so what is released is bounded by what was measured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_dp.clipping.grams import Grams, LastOf, gram_blocks, products, sum_of_blocks

# The smallest C that the engine takes, and the error of a squared norm that is nothing beside its
# square.
SMALLEST_CLIPPING_NORM = 1e-9
_NEGLIGIBLE = 1e-4 * SMALLEST_CLIPPING_NORM**2
# Blocked float sums of some thousand terms are accurate to some eps; tests/clipping measures 18 at
# most.
_ROUNDING = 32.0
_BLOCK = 1024  # numbers whose norm is taken at once


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Norms and sums are formed in float32, or in float64 for a float64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextmanager
def full_precision() -> Iterator[None]:
    """Norms and sums in true float32: TF32 products round to 1e-3, far above the rounding that the
    norms allow for."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


@dataclass
class Norms:
    """Squared norms of b examples, a bound on their rounding error, and one on that of what enters
    the sum; each (b,)."""

    squared: Tensor
    error: Tensor
    slack: Tensor


class Weights:
    """One weight for each of b examples.

    Attributes: values: (b,). scaled: records (b, T, d) in a dtype, each times the weight of its
        example.
    """

    def __init__(self, values: Tensor):
        self.values = values
        self.scaled: LastOf[Tensor] = LastOf(self._scale)

    def _scale(self, records: Tensor, dtype: torch.dtype) -> Tensor:
        return records.to(dtype) * self.values.to(dtype)[:, None, None]


class PerExampleGradient(ABC):
    """The per-example gradients of one parameter, in one of the three forms."""

    @abstractmethod
    def fits(self, shape: torch.Size, examples: int) -> bool:
        """Whether this describes gradients of ``examples`` examples for a parameter of this
        shape."""

    @abstractmethod
    def norms(self, grams: Grams | None = None) -> Norms:
        """Squared norms with their rounding. Args: grams: shared by uses that are looked at one
        after the other."""

    @abstractmethod
    def add_weighted_sum(self, total: Tensor | None, shape: torch.Size, weights: Weights) -> Tensor:
        """``total + sum_i weights[i] * G_i``, of this shape, in place where there is a total."""

    @abstractmethod
    def slack(self) -> Tensor:
        """The bound on the rounding of the weighted sum that :class:`Norms` holds, alone; (b,)."""

    @abstractmethod
    def block(self, examples: slice, rows: slice, dtype: torch.dtype) -> Tensor:
        """Some rows of some examples' gradients, explicitly: (examples, rows, n), n the parameter's
        trailing dimensions.

        Args: examples, rows: with start and stop inside the range.
        """

    def example_gradient(
        self, index: int, shape: torch.Size, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        """``G_index`` of this shape, explicitly; in float64 the slow, cancellation-free form."""
        return self.block(slice(index, index + 1), slice(0, shape[0] if shape else 1), dtype).view(
            shape
        )

    @abstractmethod
    def fingerprint(self) -> Tensor:
        """A number for each example, (b,), that tells whether a second record is the same."""

    @abstractmethod
    def keep_only(self, keep: Tensor) -> None:
        """Replace the records of examples with ``keep[i]`` False by zeros (never a product: 0 * NaN
        is NaN)."""


def _where(keep: Tensor, value: Tensor) -> Tensor:
    return torch.where(
        keep.view(-1, *[1] * (value.dim() - 1)),
        value,
        torch.zeros((), dtype=value.dtype, device=value.device),
    )


@dataclass
class OuterProducts(PerExampleGradient):
    """``G_i = sum_t left[i, t] right[i, t]^T``; left (b, T, m), right (b, T, n)."""

    left: Tensor
    right: Tensor

    def fits(self, shape: torch.Size, examples: int) -> bool:
        left, right = self.left.shape, self.right.shape
        rows = len(left) == len(right) == 3 and left[:2] == right[:2] and left[0] == examples
        return (
            rows and len(shape) >= 2 and left[2] == shape[0] and left[2] * right[2] == shape.numel()
        )

    def norms(self, grams: Grams | None = None) -> Norms:
        return outer_norms([self], grams)[0]

    def weighted_factors(self, weights: Weights) -> tuple[Tensor, Tensor]:
        """Two matrices, (m, b T) and (b T, n), whose product is ``sum_i weights[i] * G_i``."""
        dtype = accumulation_dtype(self.left.dtype)
        if (
            self.left.shape[2] < self.right.shape[2]
        ):  # the smaller factor; of equal ones the one that is shared
            left, right = weights.scaled(self.left, dtype), self.right.to(dtype)
        else:
            left, right = self.left.to(dtype), weights.scaled(self.right, dtype)
        return left.flatten(0, 1).mT, right.flatten(0, 1)

    def add_weighted_sum(self, total: Tensor | None, shape: torch.Size, weights: Weights) -> Tensor:
        left, right = self.weighted_factors(weights)
        if total is None:
            return torch.mm(left, right).view(shape)
        total.view(len(left), -1).addmm_(left, right)
        return total

    def slack(self) -> Tensor:
        dtype = accumulation_dtype(self.left.dtype)
        left, right = (
            torch.linalg.vector_norm(records, dim=2, dtype=dtype)
            for records in (self.left, self.right)
        )
        return _ROUNDING * torch.finfo(dtype).eps * left.mul_(right).sum(1)

    def block(self, examples: slice, rows: slice, dtype: torch.dtype) -> Tensor:
        left, right = self.left[examples, :, rows].to(dtype).mT, self.right[examples].to(dtype)
        # Of one, transposed and with gaps, the product of batches took more than twice as long as
        # the single one.
        return torch.mm(left[0], right[0])[None] if len(left) == 1 else torch.bmm(left, right)

    def fingerprint(self) -> Tensor:
        return torch.linalg.vector_norm(self.left, dim=(1, 2)) * torch.linalg.vector_norm(
            self.right, dim=(1, 2)
        )

    def keep_only(self, keep: Tensor) -> None:
        self.left, self.right = _where(keep, self.left), _where(keep, self.right)


# Of matrices reduced together: small ones take less time than the start of the operations on them.
_TOGETHER = 2**18  # numbers


def outer_norms(uses: Iterable[OuterProducts], grams: Grams | None = None) -> list[Norms]:
    """:meth:`PerExampleGradient.norms` of each, in their order; a few pairs of matrices (b, T, T) are held at
    once."""
    grams = LastOf(gram_blocks) if grams is None else grams
    found: list[Norms] = []
    waiting: list[_GramPair] = []
    for use in uses:
        dtype = accumulation_dtype(use.left.dtype)
        right = grams(use.right, dtype)
        pair = _GramPair(
            gram_blocks(use.left, dtype), right, max(use.left.shape[2], use.right.shape[2])
        )
        if waiting and not (
            waiting[0].alike(pair) and (len(waiting) + 1) * pair.numbers() <= _TOGETHER
        ):
            found += _reduced(waiting)
            waiting = []
        waiting.append(pair)
    return found + _reduced(waiting) if waiting else found


@dataclass
class _GramPair:
    """Gram matrices of both factors of one use, as blocks of (b, T, T), and the features of the
    wider one."""

    left: list[Tensor]
    right: list[Tensor]  # perhaps shared with other uses
    features: int

    def alike(self, other: _GramPair) -> bool:
        """Whether both can be stacked."""
        last, also = self.left[-1], other.left[-1]
        same = last.shape == also.shape and last.dtype == also.dtype and last.device == also.device
        return same and len(self.left) == len(other.left)

    def numbers(self) -> int:
        return sum(block.numel() for block in self.left)


def _reduced(pairs: Sequence[_GramPair]) -> list[Norms]:
    """From Gram matrices of uses of the same length to their norms; changes the left ones."""
    # |G|^2 = sum_{s,t} terms[s, t], terms[s, t] = (left_s . left_t)(right_s . right_t)   (Li et
    # al., section 4, eq. 3)
    lefts, rights = (
        _stacked([pair.left for pair in pairs]),
        _stacked([pair.right for pair in pairs]),
    )
    rows = len(lefts[0])  # of each use and example
    of_left, of_right = (
        blocks[-1].diagonal(dim1=1, dim2=2).reshape(rows, -1) for blocks in (lefts, rights)
    )
    trace = of_left * of_right
    limits = torch.finfo(trace.dtype)
    lost = (of_left.sum(1) + of_right.sum(1)).mul_(
        limits.tiny * max(pair.features for pair in pairs) * trace.shape[1]
    )
    terms = [left.mul_(right) for left, right in zip(lefts, rights, strict=True)]
    squared = sum_of_blocks(terms, rows)
    magnitude = sum_of_blocks([block.abs_() for block in terms], rows)
    unit = _ROUNDING * limits.eps
    error = unit * (magnitude + trace.sum(1)) + F.threshold(lost, _NEGLIGIBLE, 0.0)
    slack = unit * trace.sqrt_().sum(1)
    of_uses = (result.view(len(pairs), -1).unbind() for result in (squared, error, slack))
    return [Norms(*of_use) for of_use in zip(*of_uses, strict=True)]


def _stacked(uses: Sequence[list[Tensor]]) -> list[Tensor]:
    """Blocks of (b, T, T) of each use as blocks of (uses * b, T, T)."""
    return (
        uses[0]
        if len(uses) == 1
        else [torch.stack(level).flatten(0, 1) for level in zip(*uses, strict=True)]
    )


@dataclass
class Lookups(PerExampleGradient):
    """``G_i = sum_t onehot(tokens[i, t]) grads[i, t]^T``; tokens (b, T) integer, grads (b, T, n),
    padding already zero."""

    tokens: Tensor
    grads: Tensor

    def fits(self, shape: torch.Size, examples: int) -> bool:
        rows = self.tokens.dim() == 2 and len(self.tokens) == examples
        return (
            rows
            and len(shape) in (1, 2)
            and self.grads.shape == (*self.tokens.shape, shape[1:].numel())
        )

    def joined(self, other: Lookups) -> Lookups:
        """Both uses as one, along the positions."""
        return Lookups(
            torch.cat([self.tokens, other.tokens], 1), torch.cat([self.grads, other.grads], 1)
        )

    def norms(self, grams: Grams | None = None) -> Norms:
        dtype = accumulation_dtype(self.grads.dtype)
        # Sum the gradients of equal tokens of one example first, then square: O(b T n) and nothing
        # cancels afterwards.
        example, _, sums = self.rows(torch.float64)
        squared = torch.zeros(len(self.tokens), dtype=torch.float64, device=self.grads.device)
        squared = squared.index_add_(0, example, sums.square().sum(-1)).to(dtype)
        return Norms(squared, 4 * torch.finfo(dtype).eps * squared, self.slack())

    def rows(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The rows of all ``G_i`` that were looked up: of which example (r,), which row (r,), and
        its values (r, n)."""
        stride = int(self.tokens.max()) + 1 if self.tokens.numel() else 1
        example = torch.arange(len(self.tokens), device=self.tokens.device)[:, None]
        found, row_of = torch.unique(
            (self.tokens + example * stride).flatten(), return_inverse=True
        )
        values = torch.zeros(len(found), self.grads.shape[2], dtype=dtype, device=self.grads.device)
        values.index_add_(0, row_of, self.grads.flatten(0, 1).to(dtype))
        return found // stride, found % stride, values

    def slack(self) -> Tensor:
        # The norm is exact to its last rounding; the sum over positions in float32 is not:
        # sum_t |grad_t| <= sqrt(T sum_t |grad_t|^2)
        dtype = accumulation_dtype(self.grads.dtype)
        squares = self.grads.to(dtype).square().sum((1, 2))
        return _ROUNDING * torch.finfo(dtype).eps * squares.mul(self.tokens.shape[1]).sqrt()

    def add_weighted_sum(self, total: Tensor | None, shape: torch.Size, weights: Weights) -> Tensor:
        dtype = accumulation_dtype(self.grads.dtype)
        total = (
            torch.zeros(shape, dtype=dtype, device=self.grads.device) if total is None else total
        )
        weighted = weights.scaled(self.grads, dtype)
        total.view(len(total), -1).index_add_(0, self.tokens.flatten(), weighted.flatten(0, 1))
        return total

    def block(self, examples: slice, rows: slice, dtype: torch.dtype) -> Tensor:
        tokens, grads = self.tokens[examples], self.grads[examples].to(dtype)
        height = rows.stop - rows.start
        inside = (tokens >= rows.start) & (tokens < rows.stop)
        example = torch.arange(len(tokens), device=tokens.device)[:, None].expand_as(tokens)
        block = torch.zeros(len(tokens) * height, grads.shape[2], dtype=dtype, device=grads.device)
        block.index_add_(0, (tokens - rows.start + example * height)[inside], grads[inside])
        return block.view(len(tokens), height, -1)

    def fingerprint(self) -> Tensor:
        return torch.linalg.vector_norm(self.grads, dim=(1, 2))

    def keep_only(self, keep: Tensor) -> None:
        self.grads = _where(keep, self.grads)


@dataclass
class Dense(PerExampleGradient):
    """``G_i = gradients[i]``, shape (b, *parameter.shape)."""

    gradients: Tensor

    def fits(self, shape: torch.Size, examples: int) -> bool:
        return self.gradients.shape == (examples, *shape)

    def joined(self, other: Dense) -> Dense:
        """The gradients of both uses, added."""
        return Dense(self.gradients + other.gradients)

    def norms(self, grams: Grams | None = None) -> Norms:
        squared = squared_norms(self.gradients.flatten(1))
        return Norms(squared, torch.zeros_like(squared), self.slack())

    def add_weighted_sum(self, total: Tensor | None, shape: torch.Size, weights: Weights) -> Tensor:
        dtype = accumulation_dtype(self.gradients.dtype)
        flat, values = self.gradients.flatten(1).to(dtype), weights.values.to(dtype)
        if total is None:
            return torch.mv(flat.mT, values).view(shape)
        total.view(-1).addmv_(flat.mT, values)
        return total

    def slack(self) -> Tensor:
        dtype = accumulation_dtype(self.gradients.dtype)
        return torch.zeros(len(self.gradients), dtype=dtype, device=self.gradients.device)

    def block(self, examples: slice, rows: slice, dtype: torch.dtype) -> Tensor:
        gradients = self.gradients[examples]
        height = gradients.shape[1] if gradients.dim() > 1 else 1
        return gradients.view(len(gradients), height, -1)[:, rows].to(dtype)

    def fingerprint(self) -> Tensor:
        return torch.linalg.vector_norm(self.gradients.flatten(1), dim=1)

    def keep_only(self, keep: Tensor) -> None:
        self.gradients = _where(keep, self.gradients)


def squared_norms(rows: Tensor) -> Tensor:
    """(b, n) -> (b,). In blocks: over 4e7 numbers a float32 norm on the CPU loses 1.4 % of their
    sum of squares."""
    if rows.shape[1] <= _BLOCK:
        return torch.linalg.vector_norm(rows, dim=1).square()
    blocks = rows.shape[1] // _BLOCK
    whole = rows[:, : blocks * _BLOCK].reshape(len(rows), blocks, _BLOCK)
    norms = torch.linalg.vector_norm(whole, dim=2).double().square().sum(1)
    rest = torch.linalg.vector_norm(rows[:, blocks * _BLOCK :], dim=1).double().square()
    return (norms + rest).to(rows.dtype)


def compact(uses: Sequence[PerExampleGradient], shape: torch.Size) -> list[PerExampleGradient]:
    """The same gradients in the cheapest form: many outer products of one parameter become its
    explicit gradient.

    Forming G costs ``2 T m n`` flops an example and m n numbers to keep; the Gram form ``2 T^2 (m +
    n)`` flops and ``T (m + n)`` numbers, T counted over all uses together. Both comparisons come
    out the same way, so what is cheaper to compute is cheaper to keep, too. A parameter used once
    is decided as soon as it is seen, by the same function.
    """
    if len(uses) == 1 and not isinstance(uses[0], OuterProducts):
        return list(uses)
    outer = [use for use in uses if isinstance(use, OuterProducts)]
    others: list[PerExampleGradient] = [use for use in uses if not isinstance(use, OuterProducts)]
    if not outer:
        return others
    m, n = outer[0].left.shape[2], outer[0].right.shape[2]
    length = sum(use.left.shape[1] for use in outer)
    if m * n >= length * (m + n):
        return [*outer, *others]
    dtype = accumulation_dtype(outer[0].left.dtype)
    explicit: Tensor | None = None
    with full_precision():
        for use in outer:
            left, right = use.left.to(dtype).mT, use.right.to(dtype)
            explicit = (
                torch.bmm(left, right) if explicit is None else explicit.baddbmm_(left, right)
            )
    assert explicit is not None
    return [Dense(explicit.view(-1, *shape)), *others]


def inner_product(one: PerExampleGradient, other: PerExampleGradient) -> tuple[Tensor, Tensor]:
    """``<G_i, H_i>`` for two uses of one parameter, (b,), and a bound on its rounding error
    (b,)."""
    if isinstance(one, Dense) or isinstance(other, Dense):
        dense, records = (one, other) if isinstance(one, Dense) else (other, one)
        assert isinstance(dense, Dense)
        terms = _with_dense(dense.gradients, records)
    elif isinstance(one, OuterProducts) and isinstance(other, OuterProducts):
        # <sum_s l_s r_s^T, sum_t k_t q_t^T> = sum_{s,t} (l_s . k_t)(r_s . q_t)
        dtype = accumulation_dtype(one.left.dtype)
        terms = products(one.left.to(dtype), other.left.to(dtype))
        terms.mul_(products(one.right.to(dtype), other.right.to(dtype)))
    else:
        outer, lookups = (one, other) if isinstance(one, OuterProducts) else (other, one)
        assert isinstance(outer, OuterProducts) and isinstance(lookups, Lookups)
        dtype = accumulation_dtype(outer.left.dtype)
        # <sum_s l_s r_s^T, sum_t onehot(k_t) e_t^T> = sum_{s,t} l_s[k_t] (r_s . e_t)
        index = lookups.tokens[:, None, :].expand(-1, outer.left.shape[1], -1)
        terms = products(outer.right.to(dtype), lookups.grads.to(dtype))
        terms.mul_(outer.left.gather(2, index).to(dtype))
    terms = terms.flatten(1)
    # The terms are themselves rounded dot products; their count stands in for the walk of the small
    # ones.
    eps = torch.finfo(terms.dtype).eps
    return terms.sum(1), _ROUNDING * eps * terms.abs().sum(1)


def _with_dense(gradients: Tensor, records: PerExampleGradient) -> Tensor:
    if isinstance(records, OuterProducts):
        # <D, sum_t l_t r_t^T> = sum_t l_t^T D r_t
        left, right = records.left.to(gradients.dtype), records.right.to(gradients.dtype)
        return torch.bmm(left, gradients.flatten(2)).mul_(right).sum(-1)
    if isinstance(records, Lookups):
        rows = torch.stack([d[tokens] for d, tokens in zip(gradients, records.tokens, strict=True)])
        return rows.view_as(records.grads).mul_(records.grads.to(rows.dtype)).sum(-1)
    assert isinstance(records, Dense)
    return (gradients * records.gradients).flatten(1)
