"""How a parameter was used: the per-example gradient of one parameter, in the cheapest exact form.

For example ``i`` every layer's gradient has one of three forms, with ``t`` running over the positions of that example:

* outer products: ``G_i = sum_t left_it right_it^T``, parameter of shape (m, n). ``nn.Linear``: left = output gradient,
  right = input; GPT-2's ``Conv1D`` (weight stored in x out): left = input, right = output gradient.
* lookups: ``G_i = sum_t onehot(token_it) grad_it^T``, parameter of shape (V, n).
* dense: the gradient itself, shape (b, *parameter.shape); for biases, norms and whatever is smaller than its records.

Two uses of one parameter (a reused layer, a tied embedding) add their gradients, so their norm needs the cross term:
uses of one form are concatenated along ``t`` (the Gram matrix of the concatenation *contains* the cross terms), and the
mixed pairs have :func:`cross_term`.

Rounding (:class:`Norms`). The Gram form sums ``T * T`` signed terms, which can cancel to a result far smaller than the
terms (Li et al., section 4, does not treat this). With u = ``_ROUNDING * eps`` its ``error`` is ``u (S + D)``, S the sum
of the terms' magnitudes (errors of large entries are proportional to them) and D = ``sum_t |left_t|^2 |right_t|^2``
(errors of small entries are independent, of size ``eps |left_s||left_t||right_s||right_t|``, and add up like a random
walk). The clipped sum itself adds the same ``left_t right_t^T``, and where they cancel its rounding can exceed their sum:
``slack = u sum_t |left_t||right_t|`` bounds that, and is added to the norm before the weight is taken from it. A dense
gradient has neither: the same tensor is squared for the norm and added to the sum, so what is released is bounded by
what was measured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

# Blocked float sums of some thousand terms are accurate to some eps; tests/clipping measures 18 at most.
_ROUNDING = 32.0


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Norms and sums are formed in float32, or in float64 for a float64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class Norms:
    """Squared norms of b examples, a bound on their rounding error, and one on that of what enters the sum; each (b,)."""

    squared: Tensor
    error: Tensor
    slack: Tensor


class Use(ABC):
    """The per-example gradients of one parameter, in one of the three forms."""

    @abstractmethod
    def norms(self) -> Norms:
        """Squared norms with their rounding."""

    @abstractmethod
    def add_weighted_sum(self, total: Tensor, weights: Tensor) -> None:
        """``total += sum_i weights[i] * G_i``, in place; ``total`` has the parameter's shape."""

    @abstractmethod
    def example_gradient(self, index: int, shape: torch.Size) -> Tensor:
        """``G_index`` in float64, shape (*shape): the slow, cancellation-free form."""

    @abstractmethod
    def keep_only(self, keep: Tensor) -> None:
        """Replace the records of examples with ``keep[i]`` False by zeros (never a product: 0 * NaN is NaN)."""


def _where(keep: Tensor, value: Tensor) -> Tensor:
    return torch.where(
        keep.view(-1, *[1] * (value.dim() - 1)), value, torch.zeros((), dtype=value.dtype, device=value.device)
    )


@dataclass
class OuterProducts(Use):
    """``G_i = sum_t left[i, t] right[i, t]^T``; left (b, T, m), right (b, T, n)."""

    left: Tensor
    right: Tensor

    def joined(self, other: OuterProducts) -> OuterProducts:
        """Both uses as one, along the positions."""
        return OuterProducts(torch.cat([self.left, other.left], 1), torch.cat([self.right, other.right], 1))

    def norms(self) -> Norms:
        dtype = accumulation_dtype(self.left.dtype)
        left, right = self.left.to(dtype), self.right.to(dtype)
        # |G|^2 = sum_{s,t} (left_s . left_t)(right_s . right_t)          (Li et al., section 4, equation 3)
        terms = torch.bmm(left, left.mT).mul_(torch.bmm(right, right.mT))
        diagonal = terms.diagonal(dim1=1, dim2=2).clone()
        squared = terms.sum((1, 2))
        magnitude = terms.abs_().sum((1, 2))
        unit = _ROUNDING * torch.finfo(dtype).eps
        return Norms(squared, unit * (magnitude + diagonal.sum(1)), unit * diagonal.sqrt().sum(1))

    def add_weighted_sum(self, total: Tensor, weights: Tensor) -> None:
        left, right = self.left.to(total.dtype), self.right.to(total.dtype)
        scale = weights.to(total.dtype)[:, None, None]
        if left.shape[2] < right.shape[2]:
            left = left * scale
        else:
            right = right * scale
        total.addmm_(left.flatten(0, 1).mT, right.flatten(0, 1))

    def example_gradient(self, index: int, shape: torch.Size) -> Tensor:
        return self.left[index].double().mT @ self.right[index].double()

    def keep_only(self, keep: Tensor) -> None:
        self.left, self.right = _where(keep, self.left), _where(keep, self.right)


@dataclass
class Lookups(Use):
    """``G_i = sum_t onehot(tokens[i, t]) grads[i, t]^T``; tokens (b, T) integer, grads (b, T, n), padding already zero."""

    tokens: Tensor
    grads: Tensor

    def joined(self, other: Lookups) -> Lookups:
        """Both uses as one, along the positions."""
        return Lookups(torch.cat([self.tokens, other.tokens], 1), torch.cat([self.grads, other.grads], 1))

    def norms(self) -> Norms:
        dtype = accumulation_dtype(self.grads.dtype)
        b, length = self.tokens.shape
        # Sum the gradients of equal tokens of one example first, then square: O(b T n) and nothing cancels afterwards.
        stride = int(self.tokens.max()) + 1 if self.tokens.numel() else 1
        example = torch.arange(b, device=self.tokens.device)[:, None]
        rows, row_of = torch.unique((self.tokens + example * stride).flatten(), return_inverse=True)
        sums = torch.zeros(len(rows), self.grads.shape[2], dtype=torch.float64, device=self.grads.device)
        sums.index_add_(0, row_of, self.grads.flatten(0, 1).double())
        in_full = torch.zeros(b, dtype=torch.float64, device=self.grads.device)
        in_full.index_add_(0, rows // stride, sums.square().sum(-1))
        squared = in_full.to(dtype)
        # The norm is exact to its last rounding; the sum over positions in float32 is not:
        # sum_t |grad_t| <= sqrt(T sum_t |grad_t|^2)
        slack = _ROUNDING * torch.finfo(dtype).eps * self.grads.to(dtype).square().sum((1, 2)).mul(length).sqrt()
        return Norms(squared, 4 * torch.finfo(dtype).eps * squared, slack)

    def add_weighted_sum(self, total: Tensor, weights: Tensor) -> None:
        weighted = self.grads.to(total.dtype) * weights.to(total.dtype)[:, None, None]
        total.index_add_(0, self.tokens.flatten(), weighted.flatten(0, 1))

    def example_gradient(self, index: int, shape: torch.Size) -> Tensor:
        gradient = torch.zeros(shape, dtype=torch.float64, device=self.grads.device)
        return gradient.index_add_(0, self.tokens[index], self.grads[index].double())

    def keep_only(self, keep: Tensor) -> None:
        self.grads = _where(keep, self.grads)


@dataclass
class Dense(Use):
    """``G_i = gradients[i]``, shape (b, *parameter.shape)."""

    gradients: Tensor

    def joined(self, other: Dense) -> Dense:
        """The gradients of both uses, added."""
        return Dense(self.gradients + other.gradients)

    def norms(self) -> Norms:
        squared = torch.linalg.vector_norm(self.gradients.flatten(1), dim=1).square()
        return Norms(squared, torch.zeros_like(squared), torch.zeros_like(squared))

    def add_weighted_sum(self, total: Tensor, weights: Tensor) -> None:
        flat = self.gradients.flatten(1).to(total.dtype)
        total.view(-1).addmv_(flat.mT, weights.to(total.dtype))

    def example_gradient(self, index: int, shape: torch.Size) -> Tensor:
        return self.gradients[index].double()

    def keep_only(self, keep: Tensor) -> None:
        self.gradients = _where(keep, self.gradients)


def cross_term(one: Use, other: Use) -> tuple[Tensor, Tensor]:
    """``<G_i, H_i>`` for two uses of different forms, (b,), and a bound on its rounding error (b,)."""
    if isinstance(one, Dense) or isinstance(other, Dense):
        dense, records = (one, other) if isinstance(one, Dense) else (other, one)
        assert isinstance(dense, Dense)
        if isinstance(records, OuterProducts):
            # <D, sum_t l_t r_t^T> = sum_t l_t^T D r_t
            left, right = records.left.to(dense.gradients.dtype), records.right.to(dense.gradients.dtype)
            terms = torch.bmm(left, dense.gradients).mul_(right).sum(-1)
        else:
            assert isinstance(records, Lookups)
            rows = torch.stack([d[tokens] for d, tokens in zip(dense.gradients, records.tokens, strict=True)])
            terms = rows.mul_(records.grads.to(rows.dtype)).sum(-1)
    else:
        outer, lookups = (one, other) if isinstance(one, OuterProducts) else (other, one)
        assert isinstance(outer, OuterProducts) and isinstance(lookups, Lookups)
        dtype = accumulation_dtype(outer.left.dtype)
        # <sum_s l_s r_s^T, sum_t onehot(k_t) e_t^T> = sum_{s,t} l_s[k_t] (r_s . e_t)
        index = lookups.tokens[:, None, :].expand(-1, outer.left.shape[1], -1)
        terms = torch.bmm(outer.right.to(dtype), lookups.grads.to(dtype).mT)
        terms.mul_(outer.left.gather(2, index).to(dtype))
    terms = terms.flatten(1)
    # The terms are themselves rounded dot products; their count stands in for the walk of the small ones.
    eps = torch.finfo(terms.dtype).eps
    return terms.sum(1), _ROUNDING * eps * terms.abs().sum(1)
