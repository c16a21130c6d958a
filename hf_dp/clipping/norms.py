"""The norm of each example's gradient, never trusted below its rounding error.

Two uses of one parameter (a reused layer, a tied embedding) add their gradients, so the norm of the
sum needs the inner product of every pair of uses.

**From norms to clipping weights.** Adding or removing one example moves a weighted sum by at most
C. Each clipping function gives one weight to each *group* of parameters of each example. With n_k
the norm of group k and w_k its weight, the example's contribution is the concatenation of the
``w_k G_k``, of norm ``sqrt(sum_k (w_k n_k)^2)``:

* ``flat``, one group: ``w = min(1, C / n)``, so ``w n <= C`` (Abadi et al. 2016; Li et al.,
  algorithm 1).
* ``automatic``, one group: ``w = C / (n + gamma)``, so ``w n = C n / (n + gamma) < C`` (AUTO-S, Bu
  et al. 2023, section 4). Every example is scaled, small gradients up: the learning rate is not
  interchangeable with flat clipping's.
* ``per_layer``, K groups: ``w_k = min(1, (C / sqrt(K)) / n_k)``, so the norm is at most
  ``sqrt(K (C / sqrt(K))^2) = C`` (McMahan et al. 2018, section 2.3, all layers alike).

A second norm may bound the weights further: the example's ``w_k`` is as if its norm were at least
that one. :func:`hf_dp.plans.rounding.slack_cap` says why.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hf_dp.clipping.chunked_loss import HeadGradients
from hf_dp.clipping.forms import Uses, compact
from hf_dp.clipping.gradients import Dense, Lookups, OuterProducts, PerExampleGradient
from hf_dp.clipping.rounding import (
    Grams,
    LastOf,
    Norms,
    accumulation_dtype,
    dots,
    full_precision,
    gram_blocks,
    outer_norms,
    unit,
)
from hf_dp.errors import UnsupportedLossError


def inner_product(one: PerExampleGradient, other: PerExampleGradient) -> tuple[Tensor, Tensor]:
    """Return ``<G_i, H_i>`` of each example, (b,), and a bound on its rounding error, (b,)."""
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
        right = outer.right if isinstance(outer, OuterProducts) else outer.hidden
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


# The largest accepted relative rounding error of a squared norm; half of it reaches the norm.
_TOLERANCE = 1e-4


class ExampleNorms:
    """Squared norms by parameter, added one parameter at a time, and their sums over groups.

    A Gram sum can cancel: a true squared norm of 0.75 has come out as -0.72 in float32, and an
    example mistaken for a small one is left unclipped. So where the rounding error could exceed
    ``_TOLERANCE`` of an example's squared norm, :meth:`settle` computes the parameters responsible
    again for that example, from its explicit gradient in float64. A group of parameters, of which
    there are K, is clipped together.
    """

    def __init__(self, groups: Mapping[nn.Parameter, int], examples: int):
        self._groups = groups
        self._examples = examples
        self._norms: dict[nn.Parameter, Norms] = {}
        self._grams: Grams = LastOf(gram_blocks)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._norms

    @torch.no_grad()
    @full_precision()
    def add(self, uses: Uses) -> None:
        """Add the norms of parameters, given all uses of each."""
        alone = {
            p: first
            for p, (first, *others) in uses.items()
            if isinstance(first, OuterProducts) and not others
        }
        factors = ((use.left, use.right) for use in alone.values())
        self._norms.update(zip(alone, outer_norms(factors, self._grams), strict=True))
        for parameter, of_parameter in uses.items():
            if parameter not in alone:
                self.put(parameter, norms_of(of_parameter, self._grams))

    def put(self, parameter: nn.Parameter, norms: Norms) -> None:
        """Add the norms of a parameter that were computed elsewhere."""
        self._norms[parameter] = norms

    @torch.no_grad()
    def in_doubt(self, uses: Uses) -> Tensor:
        """Return whether :meth:`settle` has something to do, a boolean of shape (). An example is
        in doubt when the error is large relative to its group's norm so far: parameters yet to come
        only add to the norm."""
        doubts = [group.doubtful for group in self._groups_of(uses)]
        return torch.cat(doubts).any() if doubts else torch.zeros((), dtype=torch.bool)

    def _groups_of(self, uses: Uses) -> list[_Group]:
        groups = sorted({self._groups[parameter] for parameter in uses})
        return [_Group(self._members(group)) for group in groups]

    @torch.no_grad()
    @full_precision()
    def settle(self, uses: Uses) -> None:
        """Compute doubtful norms again, for the parameters whose uses are given."""
        for group in self._groups_of(uses):
            for index in group.doubtful.nonzero().flatten().tolist():
                group.settle(uses, index)
            for place, (parameter, norms) in enumerate(group.members.items()):
                self._norms[parameter] = Norms(
                    group.squared[place], group.error[place], norms.slack
                )

    def result(self) -> tuple[Tensor, Tensor]:
        """Return norms (K, b), ``inf`` where not finite, and their slack (K, b).

        Norm plus slack bounds what the example can contribute to a sum, rounding of the sum
        included; weights are computed from it. Where an error remains that could not be settled,
        the norm is the upper end of its interval.
        """
        results = []
        for group in sorted(set(self._groups.values())):
            if members := self._members(group):
                results.append(_Group(members).result())
            else:
                zeros = torch.zeros(self._examples, device=self._device())
                results.append((zeros, zeros))
        norms, slack = zip(*results, strict=True)
        return torch.stack(norms), torch.stack(slack)

    def _members(self, group: int) -> dict[nn.Parameter, Norms]:
        return {p: norms for p, norms in self._norms.items() if self._groups[p] == group}

    def _device(self) -> torch.device:
        for norms in self._norms.values():  # a parameter kept on the CPU computes elsewhere
            return norms.squared.device
        return next(iter(self._groups)).device


class _Group:
    """Norms that are clipped together, side by side: (parameters, b)."""

    def __init__(self, members: Mapping[nn.Parameter, Norms]):
        self.members = members
        self.squared = torch.stack([norms.squared for norms in members.values()])
        self.error = torch.stack([norms.error for norms in members.values()])
        self._total, self._total_error = self.squared.sum(0), self.error.sum(0)
        self._inexact = self._total_error > _TOLERANCE * self._total.clamp_min(0)

    @property
    def doubtful(self) -> Tensor:
        """Return the examples whose error is large beside their norm."""
        return self._inexact & torch.isfinite(self._total + self._total_error)

    def settle(self, uses: Uses, index: int) -> None:
        """Replace the most doubtful squared norms of one example until the rest's error is small.
        One norm is replaced at a time: a large error can make the total look large, and a smaller
        error harmless beside it."""
        squared, error = self.squared[:, index], self.error[:, index]
        members = list(self.members)
        known = torch.tensor([p in uses for p in members], device=error.device)
        open_error = torch.where(known, error, torch.zeros_like(error))
        while bool(error.sum() > _TOLERANCE * squared.sum().clamp_min(0)) and bool(
            open_error.any()
        ):
            place = int(open_error.argmax())
            parameter = members[place]
            gradient = sum(use.example_gradient(index, parameter.shape) for use in uses[parameter])
            assert isinstance(gradient, Tensor)
            squared[place] = gradient.square().sum().to(squared.dtype)
            error[place] = open_error[place] = 0

    def result(self) -> tuple[Tensor, Tensor]:
        """Return norms and slack of each example, (b,)."""
        slack = torch.stack([norms.slack for norms in self.members.values()])
        slack = slack.square().sum(0).sqrt()
        upper = torch.where(self._inexact, self._total + self._total_error, self._total)
        # An example with any part that is not finite has no norm and is removed; this includes
        # -inf and an error too large to judge.
        usable = torch.isfinite(torch.stack([self._total, self._total_error, slack])).all(0)
        norms = torch.where(usable, upper.clamp_min(0).sqrt(), torch.full_like(upper, torch.inf))
        return norms, slack


def norms_of(uses: Sequence[PerExampleGradient], grams: Grams | None = None) -> Norms:
    """Return the norms of one parameter's gradient, the sum over its uses.
    ``|sum_u G_u|^2 = sum_u |G_u|^2 + 2 sum_{u<v} <G_u, G_v>``."""
    if len(uses) == 1:
        return uses[0].norms(grams)
    parts = [use.norms(grams) for use in uses]
    squared = torch.stack([part.squared for part in parts]).sum(0)
    error = torch.stack([part.error for part in parts]).sum(0)
    for one, other in itertools.combinations(uses, 2):
        more, more_error = inner_product(one, other)
        squared, error = squared + 2 * more, error + 2 * more_error
    return Norms(squared, error, torch.stack([part.slack for part in parts]).sum(0))


def gathered(uses: Sequence[PerExampleGradient], shape: torch.Size) -> list[PerExampleGradient]:
    """Return all uses of one parameter, with those of one form joined where that is cheaper."""
    if len(uses) == 1:
        return list(uses)
    joined: list[PerExampleGradient] = []
    for use in compact(uses, shape):
        for position, known in enumerate(joined):
            both = known.joined(use) if type(known) is type(use) else None
            if both is not None:
                joined[position] = both
                break
        else:
            joined.append(use)
    return joined


# AUTO-S's stability constant; its authors' default (Bu et al. 2023, section 4.2).
AUTOMATIC_GAMMA = 0.01


def clipping_weights(
    clipping: str, norms: Tensor, clipping_norm: float, at_least: Tensor | None = None
) -> Tensor:
    """Return the weight of each group of each example, (K, b) as ``norms``.

    Guarantee: for finite norms, ``sqrt(sum_k (weights[k] norms[k])^2) <= clipping_norm``, up to
    one rounding; and the same of ``at_least``.

    | norm (flat) | weight |
    |-------------|--------|
    | 0           | 1      |
    | <= C        | 1      |
    | > C         | C/norm |
    | inf or NaN  | 0 in all groups (the caller also zeroes its gradients: 0 * NaN is NaN) |

    Args:
        clipping: one of :data:`hf_dp.plans.dp_sgd.CLIPPINGS`.
        norms: (K, b), float.
        clipping_norm: C > 0, in the units of the norms.
        at_least: norms below which none counts, (K, b); None for 0.
    """
    if at_least is not None:
        norms = torch.maximum(norms, at_least)
    if clipping == "automatic":
        weights = clipping_norm / (norms + AUTOMATIC_GAMMA)
    else:
        bound = clipping_norm / math.sqrt(len(norms))  # one group: C itself
        weights = bound / norms.clamp_min(bound)
    return torch.where(torch.isfinite(norms).all(0), weights, torch.zeros_like(weights))
