"""Inner products of the gradients that two uses of one parameter give each example.

Two uses of one parameter (a reused layer, a tied embedding) add their gradients, so the norm of the
sum needs the inner product of every pair of uses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_dp.clipping.gradients import Dense, Lookups, OuterProducts, PerExampleGradient
from hf_dp.clipping.head_gradients import HeadGradients
from hf_dp.clipping.products import dots
from hf_dp.clipping.rounding import accumulation_dtype, unit
from hf_dp.errors import UnsupportedLossError


def inner_product(one: PerExampleGradient, other: PerExampleGradient) -> tuple[Tensor, Tensor]:
    """Return ``<G_i, H_i>`` of each example, (b,), and a bound on its rounding error, (b,).

    Raises: UnsupportedLossError for a head by blocks beside another linear layer.
    """
    if isinstance(one, Dense) or isinstance(other, Dense):
        dense, factored = (one, other) if isinstance(one, Dense) else (other, one)
        assert isinstance(dense, Dense)
        terms = _with_dense(dense.gradients, factored)
    elif isinstance(one, OuterProducts) and isinstance(other, OuterProducts):
        # <sum_s l_s r_s^T, sum_t k_t q_t^T> = sum_{s,t} (l_s . k_t)(r_s . q_t)
        dtype = accumulation_dtype(one.left.dtype)
        terms = dots(one.left, other.left, dtype)
        terms.mul_(dots(one.right, other.right, dtype))
    elif not isinstance(one, Lookups) and not isinstance(other, Lookups):
        raise UnsupportedLossError(
            "The head's weight is also the weight of another linear layer, so the norm of its "
            "gradient cannot be formed by blocks. Set chunked_loss=False."
        )
    else:
        outer, lookups = (other, one) if isinstance(one, Lookups) else (one, other)
        assert isinstance(outer, OuterProducts | HeadGradients) and isinstance(lookups, Lookups)
        right = outer.right if isinstance(outer, OuterProducts) else outer.logits.hidden
        dtype = accumulation_dtype(right.dtype)
        # <sum_s l_s r_s^T, sum_t onehot(k_t) e_t^T> = sum_{s,t} l_s[k_t] (r_s . e_t)
        terms = dots(right, lookups.grads, dtype)
        terms.mul_(outer.left_at(lookups.tokens).to(dtype))
    terms = terms.flatten(1)
    # The terms are themselves rounded dot products; their count stands in for the random walk of
    # the small ones.
    return terms.sum(1), unit(terms.dtype) * terms.abs().sum(1)


def _with_dense(gradients: Tensor, other: PerExampleGradient) -> Tensor:
    if isinstance(other, OuterProducts):
        # <D, sum_t l_t r_t^T> = sum_t l_t^T D r_t
        left, right = other.left.to(gradients.dtype), other.right.to(gradients.dtype)
        return torch.bmm(left, gradients.flatten(2)).mul_(right).sum(-1)
    if isinstance(other, HeadGradients):
        terms = [_with_dense(gradients[:, rows], part) for rows, part in other.factors()]
        return torch.cat(terms, 1)
    if isinstance(other, Lookups):
        found = torch.stack([d[tokens] for d, tokens in zip(gradients, other.tokens, strict=True)])
        return found.view_as(other.grads).mul_(other.grads.to(found.dtype)).sum(-1)
    assert isinstance(other, Dense)
    return (gradients * other.gradients).flatten(1)
