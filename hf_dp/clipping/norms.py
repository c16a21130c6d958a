"""The norm of each example's gradient, never trusted below its rounding error."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hf_dp.clipping.gradients import (
    Dense,
    Lookups,
    Norms,
    OuterProducts,
    PerExampleGradient,
    compact,
    full_precision,
    inner_product,
    outer_norms,
)
from hf_dp.clipping.grams import Grams, LastOf, gram_blocks

# Largest relative rounding error of a squared norm that is accepted; half of it reaches the norm.
_TOLERANCE = 1e-4


class ExampleNorms:
    """Squared norms by parameter, gathered one parameter at a time, and their sums over *groups*
    that are clipped together.

    A Gram sum can cancel: a true squared norm of 0.75 has come out as -0.72 in float32, and an
    example taken for small is left unclipped. So where the rounding error could exceed
    ``_TOLERANCE`` of an example's squared norm, the parameters responsible are computed again for
    that example from its explicit gradient in float64 (:meth:`settle`).

    Args: groups: the group, 0..K-1, of each parameter. examples: b.
    """

    def __init__(self, groups: Mapping[nn.Parameter, int], examples: int):
        self._groups = groups
        self._examples = examples
        self._rows: dict[nn.Parameter, Norms] = {}
        self._grams: Grams = LastOf(gram_blocks)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._rows

    @torch.no_grad()
    @full_precision()
    def add(self, uses: Mapping[nn.Parameter, Sequence[PerExampleGradient]]) -> None:
        """Note parameters, given all uses of each."""
        alone = {
            p: first
            for p, (first, *others) in uses.items()
            if isinstance(first, OuterProducts) and not others
        }
        self._rows.update(zip(alone, outer_norms(alone.values(), self._grams), strict=True))
        for parameter, of_parameter in uses.items():
            if parameter not in alone:
                self.put(parameter, norms_of(of_parameter, self._grams))

    def put(self, parameter: nn.Parameter, norms: Norms) -> None:
        """Note a parameter whose norms were computed elsewhere."""
        self._rows[parameter] = norms

    @torch.no_grad()
    @full_precision()
    def settle(self, uses: Mapping[nn.Parameter, Sequence[PerExampleGradient]]) -> None:
        """Compute doubtful examples again, from those parameters whose uses are given.

        An example is in doubt when the error is large beside what its group has so far: parameters
        yet to come only add.
        """
        for group in sorted({self._groups[parameter] for parameter in uses}):
            members = self._members(group)
            squared = torch.stack([self._rows[p].squared for p in members])  # (parameters, b)
            error = torch.stack([self._rows[p].error for p in members])
            total = squared.sum(0)
            doubtful = (error.sum(0) > _TOLERANCE * total.clamp_min(0)) & torch.isfinite(total)
            doubtful &= torch.isfinite(error.sum(0))
            if bool(doubtful.any()):
                for index in doubtful.nonzero().flatten().tolist():
                    _settle(members, uses, squared[:, index], error[:, index], index)
                for row, parameter in enumerate(members):
                    self._rows[parameter] = Norms(
                        squared[row], error[row], self._rows[parameter].slack
                    )

    def result(self) -> tuple[Tensor, Tensor]:
        """Norms (K, b), ``inf`` where not finite, and their slack (K, b).

        Norm plus slack bounds what the example can contribute to a sum, rounding of the sum
        included: weights are taken from it. Where an error is left that could not be settled, the
        norm is the upper end.
        """
        results = [self._group(group) for group in sorted(set(self._groups.values()))]
        return torch.stack([norm for norm, _ in results]), torch.stack(
            [slack for _, slack in results]
        )

    def _group(self, group: int) -> tuple[Tensor, Tensor]:
        members = self._members(group)
        if not members:
            zeros = torch.zeros(self._examples, device=self._device())
            return zeros, zeros
        squared = torch.stack([self._rows[p].squared for p in members]).sum(0)
        error = torch.stack([self._rows[p].error for p in members]).sum(0)
        slack = torch.stack([self._rows[p].slack for p in members]).square().sum(0).sqrt()
        upper = torch.where(error > _TOLERANCE * squared.clamp_min(0), squared + error, squared)
        # Not finite in any part, -inf and an error too large to judge included: no norm, the
        # example is removed.
        usable = torch.isfinite(squared) & torch.isfinite(error) & torch.isfinite(slack)
        return torch.where(
            usable, upper.clamp_min(0).sqrt(), torch.full_like(upper, torch.inf)
        ), slack

    def _members(self, group: int) -> list[nn.Parameter]:
        return [parameter for parameter in self._rows if self._groups[parameter] == group]

    def _device(self) -> torch.device:
        return next(iter(self._groups)).device


def _settle(
    members: Sequence[nn.Parameter],
    uses: Mapping[nn.Parameter, Sequence[PerExampleGradient]],
    squared: Tensor,
    error: Tensor,
    index: int,
) -> None:
    """Replace, in place, the most doubtful squared norms of one example until what is left of the
    error is small.

    One at a time: a large error can make the total look large, beside which a smaller one seems
    harmless.
    """
    open_error = torch.stack(
        [e if p in uses else torch.zeros_like(e) for p, e in zip(members, error, strict=True)]
    )
    while bool(error.sum() > _TOLERANCE * squared.sum().clamp_min(0)) and bool(open_error.any()):
        row = int(open_error.argmax())
        parameter = members[row]
        gradient = sum(use.example_gradient(index, parameter.shape) for use in uses[parameter])
        assert isinstance(gradient, Tensor)
        squared[row] = gradient.square().sum().to(squared.dtype)
        error[row] = open_error[row] = 0


def norms_of(uses: Sequence[PerExampleGradient], grams: Grams | None = None) -> Norms:
    """Of one parameter's gradient: ``|sum_u G_u|^2 = sum_u |G_u|^2 + 2 sum_{u<v} <G_u, G_v>``."""
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
    """All uses of one parameter, each as the tape handed it over, with those of one form joined
    where that is cheaper."""
    if len(uses) == 1:
        return list(uses)
    joined: list[PerExampleGradient] = []
    for use in compact(uses, shape):
        for position, known in enumerate(joined):
            if (isinstance(use, Dense) and isinstance(known, Dense)) or (
                isinstance(use, Lookups) and isinstance(known, Lookups)
            ):
                joined[position] = known.joined(use)  # type: ignore[arg-type]
                break
        else:
            joined.append(use)
    return joined
