"""The per-example gradient of one parameter, in the cheapest exact form.

For example ``i`` every layer's gradient has one of three forms, with ``t`` running over the
positions of that example:

* outer products: ``G_i = sum_t left_it right_it^T``, for a parameter of shape (m, n) once its
  trailing dimensions are flattened. ``nn.Linear``: left = output gradient, right = input. GPT-2's
  ``Conv1D`` (weight stored in x out): the other way round. ``nn.Conv2d``: left = output gradient,
  right = the patch under the kernel.
* lookups: ``G_i = sum_t onehot(token_it) grad_it^T``, for a parameter of shape (V, n), or (V,) with
  n = 1.
* dense: the gradient itself, shape (b, *parameter.shape); for biases, norms and every parameter
  smaller than the activations it met.

Each object holds what one *use* of a parameter contributes. A parameter with several uses (a reused
layer, a tied embedding) has the sum of theirs, so its norm also needs the inner product of every
pair (:mod:`hf_dp.clipping.norms`). Uses that are cheap to join are joined into one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_dp.clipping.rounding import (
    Grams,
    LastOf,
    Norms,
    accumulation_dtype,
    outer_norms,
    squared_norms,
    unit,
)
from hf_dp.errors import UnsupportedModelError

_BLOCK = 2**22  # numbers of a product that are added to a wider total at once

# Terms that a float32 product adds up. Over constant ones (the worst that was found) 8,192 terms
# are off by 0.6 of their slack in a CPU's blocked kernels. Kernels for thin products add one by one
# and lose 22 times the slack; dense gradients are added one by one, too.
_TERMS, _THIN, _ADDED = 2**13, 16, 64


class Weights:
    """One weight for each of b examples, ``values`` (b,). ``scaled(vectors, dtype)`` returns
    vectors (b, T, d), each times the weight of its example."""

    def __init__(self, values: Tensor):
        self.values = values
        of_vectors = values.view(-1, 1, 1)
        self.scaled = LastOf(lambda vectors, dtype: vectors * of_vectors.to(dtype))


class PerExampleGradient(ABC):
    """The gradients that one use of a parameter gives b examples, in one of the three forms."""

    values: ClassVar[tuple[str, ...]] = ()  # its tensors (b, ...), in each of which it is linear

    @abstractmethod
    def fits(self, shape: torch.Size, examples: int) -> bool:
        """Return whether this has ``examples`` gradients of a parameter of this shape."""

    @abstractmethod
    def norms(self, grams: Grams | None = None) -> Norms:
        """Return squared norms with their rounding error. Gradients whose norms are taken one after
        the other share ``grams``."""

    @abstractmethod
    def add_weighted_sum(self, total: Tensor, weights: Weights) -> None:
        """Add ``sum_i weights[i] * G_i`` to a total of the parameter's shape, in place. The sum
        over the b examples is formed in float32 or better, and off by ``sum_i weights[i] slack[i]``
        at most, in norm. What adding it to the total rounds depends on the total's type."""

    @abstractmethod
    def size(self) -> Tensor:
        """Return the sum of the norms of the terms that each gradient is a sum of, (b,). Padding
        adds nothing to it, and the form does not change it."""

    def slack(self) -> Tensor:
        """Return what rounds each example's part of the weighted sum (:class:`Norms`), (b,)."""
        size = self.size()
        return unit(size.dtype) * size

    @abstractmethod
    def block(self, examples: slice, rows: slice, dtype: torch.dtype) -> Tensor:
        """Return some rows of some examples' gradients, formed explicitly. Both slices have start
        and stop inside their range. The shape is (examples, rows, n), with n the product of the
        parameter's trailing dimensions."""

    def example_gradient(
        self, index: int, shape: torch.Size, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        """Return ``G_index``, formed explicitly; in float64 nothing cancels, and it is slow."""
        height = shape[0] if shape else 1
        return self.block(slice(index, index + 1), slice(0, height), dtype).view(shape)

    def fingerprint(self) -> Tensor:
        """Return a number for each example, (b,), by which two captures can be compared."""
        first, *others = (
            torch.linalg.vector_norm(getattr(self, name).flatten(1), dim=1) for name in self.values
        )
        return math.prod(others, start=first)

    def keep_only(self, keep: Tensor) -> None:
        """Set the gradients of examples with ``keep[i]`` False to zero. Never by a product: 0 * NaN
        is NaN."""
        for name in self.values:
            value = getattr(self, name)
            removed = ~keep.view(-1, *[1] * (value.dim() - 1))
            setattr(self, name, value.masked_fill(removed, 0))

    def joined(self, other: Any) -> PerExampleGradient | None:
        """Return the sum of two uses of this form as one, or None where that is not cheaper."""

    def of_units(self, rows: int) -> PerExampleGradient:
        """Return the gradients of units: sums over each ``rows`` examples in a row."""
        raise UnsupportedModelError(
            f"{type(self).__name__} cannot be summed over the rows of a unit. Set "
            "chunked_loss=False."
        )


def of_units(values: Tensor, rows: int) -> Tensor:
    """Return positions (b, T, ...) of examples as positions (b / rows, rows T, ...) of units. Sums
    of outer products and of lookups over positions add up by joining the positions, so a unit of k
    examples of T positions is one example of k T."""
    return values.reshape(len(values) // rows, -1, *values.shape[2:])


def positions(tensor: Tensor, feature_dims: int = 1) -> Tensor:
    """Return (b, ..., features) as (b, T, d); T = 1 if there is no dimension between."""
    if tensor.dim() == 3 and feature_dims == 1:
        return tensor
    split = tensor.dim() - feature_dims
    return tensor.reshape(
        tensor.shape[0], tensor.shape[1:split].numel(), tensor.shape[split:].numel()
    )


@dataclass(frozen=True)
class Unformed:
    """Gradients that are not formed yet: ``form(*tensors, *given)``. It must treat each example,
    a row of every tensor (b, ...), by itself. So those of several uses of parameters are formed at
    once, one use after the other in the first dimension."""

    form: Callable[..., Dense]
    tensors: tuple[Tensor, ...]
    given: tuple[Hashable, ...] = ()
    numbers: int = 0  # in the gradients, where these may be larger than the tensors

    def formed(self) -> Dense:
        """Return the gradients."""
        return self.form(*self.tensors, *self.given)


def summed(terms: Tensor, dtype: torch.dtype, dim: int = 1) -> Unformed:
    """Return per-example gradients that are sums of ``terms`` (b, ...) over one dimension."""
    return Unformed(sum_of, (terms,), (dtype, dim))


def sum_of(terms: Tensor, dtype: torch.dtype, dim: int = 1) -> Dense:
    """Return sums of ``terms`` (b, ...) over one dimension. The terms may cancel, and the order in
    which they are added depends on padding."""
    total = terms.sum(dim, dtype=dtype)
    if terms.shape[dim] == 1:
        return Dense(total)
    others = tuple(each for each in range(1, terms.dim()) if each != dim)
    sizes = torch.linalg.vector_norm(terms, dim=others, dtype=dtype) if others else terms.abs()
    return Dense(total, of_terms=sizes.sum(1, dtype=dtype))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right``, (m, n), to a total of m n numbers, in place."""
    rows = total if total.dim() == 2 else total.view(len(left), -1)
    if min(rows.shape) < _THIN:
        left, right = left.to(rows.dtype), right.to(rows.dtype)
    if rows.dtype == left.dtype:
        rows.addmm_(left, right)
        return
    if len(right) > _TERMS:
        for first in range(0, len(right), _TERMS):
            terms = slice(first, first + _TERMS)
            add_product(rows, left[:, terms], right[terms])
        return
    if rows.numel() <= _BLOCK:
        rows.add_(torch.mm(left, right))
        return
    # By blocks of one size, so that no second tensor of the size of a large parameter is held.
    blocks = min(-(-rows.numel() // _BLOCK), len(rows) // _THIN)
    for some, of_left in zip(rows.tensor_split(blocks), left.tensor_split(blocks), strict=True):
        some.add_(torch.mm(of_left, right))


def _lengths(vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the norms, (b, T), of vectors (b, T, d)."""
    if vectors.stride(2) == 1 or vectors.device.type != "cpu":
        return torch.linalg.vector_norm(vectors, dim=2, dtype=dtype)
    vectors = vectors.to(dtype)  # of a convolution, for which a norm takes 4 to 10 times as long
    return torch.linalg.vecdot(vectors, vectors).sqrt()


@dataclass
class OuterProducts(PerExampleGradient):
    """``G_i = sum_t left[i, t] right[i, t]^T``; left (b, T, m), right (b, T, n)."""

    values = ("left", "right")
    left: Tensor
    right: Tensor

    def fits(self, shape: torch.Size, examples: int) -> bool:
        left, right = self.left.shape, self.right.shape
        alike = len(left) == len(right) == 3 and left[:2] == right[:2] and left[0] == examples
        factored = alike and len(shape) >= 2 and left[2] == shape[0]
        return factored and left[2] * right[2] == shape.numel()

    def norms(self, grams: Grams | None = None) -> Norms:
        return outer_norms([(self.left, self.right)], grams)[0]

    def left_at(self, tokens: Tensor) -> Tensor:
        """Return the left factors at some rows of each example, (b, T, S), for tokens (b, S)."""
        return self.left.gather(2, tokens[:, None, :].expand(-1, self.left.shape[1], -1))

    def weighted_factors(self, weights: Weights) -> tuple[Tensor, Tensor]:
        """Return two matrices, (m, b T) and (b T, n), whose product is the weighted sum."""
        dtype = accumulation_dtype(self.left.dtype)
        # Scale the smaller factor; if both are of one size, the right one, which is often shared.
        if self.left.shape[2] < self.right.shape[2]:
            left, right = weights.scaled(self.left, dtype), self.right.to(dtype)
        else:
            left, right = self.left.to(dtype), weights.scaled(self.right, dtype)
        return left.flatten(0, 1).mT, right.flatten(0, 1)

    def add_weighted_sum(self, total: Tensor, weights: Weights) -> None:
        add_product(total, *self.weighted_factors(weights))

    def size(self) -> Tensor:
        dtype = accumulation_dtype(self.left.dtype)
        return torch.linalg.vecdot(_lengths(self.left, dtype), _lengths(self.right, dtype))

    def block(self, examples: slice, rows: slice, dtype: torch.dtype) -> Tensor:
        left, right = self.left[examples, :, rows].to(dtype).mT, self.right[examples].to(dtype)
        # For a single strided example, bmm took more than twice as long as mm.
        return torch.mm(left[0], right[0])[None] if len(left) == 1 else torch.bmm(left, right)

    def of_units(self, rows: int) -> OuterProducts:
        return OuterProducts(of_units(self.left, rows), of_units(self.right, rows))


@dataclass
class Lookups(PerExampleGradient):
    """``G_i = sum_t onehot(tokens[i, t]) grads[i, t]^T``.

    Args:
        tokens: integers, (b, T).
        grads: (b, T, n), zero at padding.
    """

    values = ("grads",)
    tokens: Tensor
    grads: Tensor

    def fits(self, shape: torch.Size, examples: int) -> bool:
        alike = self.tokens.dim() == 2 and len(self.tokens) == examples and len(shape) in (1, 2)
        return alike and self.grads.shape == (*self.tokens.shape, shape[1:].numel())

    def joined(self, other: Lookups) -> Lookups:
        return Lookups(
            torch.cat([self.tokens, other.tokens], 1), torch.cat([self.grads, other.grads], 1)
        )

    def norms(self, grams: Grams | None = None) -> Norms:
        dtype = accumulation_dtype(self.grads.dtype)
        # Sum the gradients of equal tokens of one example first, then square: O(b T n), and nothing
        # cancels afterwards. As many sums as positions, some of them empty: to count the tokens
        # would make the processor wait for the device.
        sorted_tokens, order = self.tokens.sort(1)
        new = sorted_tokens.diff(dim=1, prepend=sorted_tokens[:, :1]) != 0
        places = torch.empty_like(order).scatter_(1, order, new.cumsum(1))
        places += places.shape[1] * torch.arange(len(places), device=places.device)[:, None]
        sums = torch.zeros(
            places.numel(), self.grads.shape[2], dtype=torch.float64, device=self.grads.device
        ).index_add_(0, places.flatten(), self.grads.flatten(0, 1).double())
        squared = sums.square_().view(len(self.tokens), -1).sum(1).to(dtype)
        return Norms(squared, 4 * torch.finfo(dtype).eps * squared, self.slack())

    def rows(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return all rows of ``G_i`` that were looked up: the example of each (r,), the row of the
        parameter (r,) and its values (r, n)."""
        stride = int(self.tokens.max()) + 1 if self.tokens.numel() else 1
        example = torch.arange(len(self.tokens), device=self.tokens.device)[:, None]
        found, row_of = torch.unique(
            (self.tokens + example * stride).flatten(), return_inverse=True
        )
        values = torch.zeros(len(found), self.grads.shape[2], dtype=dtype, device=self.grads.device)
        values.index_add_(0, row_of, self.grads.flatten(0, 1).to(dtype))
        return found // stride, found % stride, values

    def size(self) -> Tensor:
        dtype = accumulation_dtype(self.grads.dtype)
        return torch.linalg.vector_norm(self.grads, dim=2, dtype=dtype).sum(1)

    def add_weighted_sum(self, total: Tensor, weights: Weights) -> None:
        weighted = weights.scaled(self.grads, total.dtype)
        total.view(len(total), -1).index_add_(0, self.tokens.flatten(), weighted.flatten(0, 1))

    def block(self, examples: slice, rows: slice, dtype: torch.dtype) -> Tensor:
        tokens, grads = self.tokens[examples], self.grads[examples].to(dtype)
        height = rows.stop - rows.start
        inside = (tokens >= rows.start) & (tokens < rows.stop)
        example = torch.arange(len(tokens), device=tokens.device)[:, None].expand_as(tokens)
        block = torch.zeros(len(tokens) * height, grads.shape[2], dtype=dtype, device=grads.device)
        block.index_add_(0, (tokens - rows.start + example * height)[inside], grads[inside])
        return block.view(len(tokens), height, -1)

    def of_units(self, rows: int) -> Lookups:
        return Lookups(of_units(self.tokens, rows), of_units(self.grads, rows))


@dataclass
class Dense(PerExampleGradient):
    """``G_i = gradients[i]``, shape (b, *parameter.shape), or (b, 1) for a single number.

    Args:
        owned: whether nothing else holds the tensor, so that a sum may be formed in its place.
        of_terms: the size, (b,), of what it was summed from, if it was. The weight of an example
            must not depend on the form, which its neighbors help to decide.
    """

    values = ("gradients",)
    gradients: Tensor
    owned: bool = False
    of_terms: Tensor | None = None

    def __post_init__(self) -> None:
        if self.gradients.dim() == 1:
            self.gradients = self.gradients[:, None]

    def fits(self, shape: torch.Size, examples: int) -> bool:
        return self.gradients.shape == (examples, *(shape or (1,)))

    def joined(self, other: Dense) -> Dense:
        return Dense(
            self.gradients + other.gradients, owned=True, of_terms=self.size() + other.size()
        )

    def norms(self, grams: Grams | None = None) -> Norms:
        squared = squared_norms(self.gradients.flatten(1))
        size = squared.sqrt() if self.of_terms is None else self.of_terms
        return Norms(squared, torch.zeros_like(squared), unit(size.dtype) * size)

    def weighted(self, weights: Weights) -> Iterator[Tensor]:
        """Yield flat parts of the weighted sum, to be added one after the other."""
        dtype = accumulation_dtype(self.gradients.dtype)
        flat, values = self.gradients.flatten(1).to(dtype), weights.values.to(dtype)
        if self.owned and len(flat) == 1:
            yield flat[0].mul_(values)
            return
        for some, weights_of in zip(flat.split(_ADDED), values.split(_ADDED), strict=True):
            yield torch.mv(some.mT, weights_of)

    def add_weighted_sum(self, total: Tensor, weights: Weights) -> None:
        for part in self.weighted(weights):
            total.add_(part.view(total.shape))

    def size(self) -> Tensor:
        if self.of_terms is not None:
            return self.of_terms
        return squared_norms(self.gradients.flatten(1)).sqrt()

    def block(self, examples: slice, rows: slice, dtype: torch.dtype) -> Tensor:
        gradients = self.gradients[examples]
        return gradients.view(*gradients.shape[:2], -1)[:, rows].to(dtype)

    def of_units(self, rows: int) -> Dense:
        sizes = self.of_terms
        return Dense(
            self.gradients.unflatten(0, (-1, rows)).sum(1),
            owned=True,
            of_terms=None if sizes is None else sizes.view(-1, rows).sum(1),
        )
