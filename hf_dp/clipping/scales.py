"""Scales: public positive numbers by which a parameter's gradients are multiplied before all else.

A parameter of m rows and n numbers in each has the scales ``s = rows columns^T`` (m, n), so that a
sum of outer products stays one: ``s * sum_t l_t r_t^T = sum_t (rows * l_t)(columns * r_t)^T``. Then
norms, slack, weights and sums are those of what was scaled. In what an embedding adds,
``sum_t onehot(k_t) e_t^T``, e_t is multiplied by ``rows[k_t] columns``. A parameter's scales are of
its own rows and columns: all its uses have the same, in tied and in transposed layers, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_dp._validate import invalid
from hf_dp.clipping.gradients import Dense, Lookups, OuterProducts, PerExampleGradient
from hf_dp.clipping.rounding import accumulation_dtype
from hf_dp.errors import UnsupportedModelError


def sides(shape: torch.Size) -> tuple[int, int]:
    """Return (m, n) of a parameter of shape (m, ...); n is 1 for one of shape (m,) or ()."""
    return (shape[0] if shape else 1), shape[1:].numel()


@dataclass(frozen=True)
class Scale:
    """Scales of one parameter: ``rows`` (m,) and ``columns`` (n,), both above 0."""

    rows: Tensor
    columns: Tensor

    def fitted(self, name: str, parameter: Tensor) -> Scale:
        """Return the scales on the parameter's device. Raises: InvalidArgumentError for those of
        another shape, or that are not above 0."""
        numbers = torch.cat([self.rows, self.columns])
        fits = (*self.rows.shape, *self.columns.shape) == sides(parameter.shape)
        if not fits or not bool((torch.isfinite(numbers) & (numbers > 0)).all()):
            raise invalid("scales", name, "to have scales of its shape, finite and above 0")
        return Scale(self.rows.to(parameter.device), self.columns.to(parameter.device))

    def of(self, use: PerExampleGradient) -> PerExampleGradient:
        """Return the gradients of one use times the scales, in float32 or better. Raises:
        UnsupportedModelError for gradients that are formed by blocks."""
        if isinstance(use, OuterProducts):
            return OuterProducts(_times(use.left, self.rows), _times(use.right, self.columns))
        if isinstance(use, Lookups):
            rows = self.rows[use.tokens][..., None]
            return Lookups(use.tokens, _times(use.grads, self.columns).mul_(rows))
        if isinstance(use, Dense):
            b, m, n = len(use.gradients), len(self.rows), len(self.columns)
            scaled = _times(use.gradients.reshape(b, m, n), self.columns).mul_(self.rows[:, None])
            size = use.of_terms
            if size is not None:  # a term may lie where the scale is largest
                size = size * self.rows.max() * self.columns.max()
            return Dense(scaled.view_as(use.gradients), owned=True, of_terms=size)
        raise UnsupportedModelError(
            "Gradients of experts, and of a head in blocks, cannot be scaled. Freeze the experts, "
            "set chunked_loss=False, choose label words of one token, or train without scales."
        )

    @torch.no_grad()
    def undo(self, total: Tensor) -> None:
        """Divide a sum of scaled gradients by the scales, in place."""
        by_rows = total.view(len(self.rows), len(self.columns))
        by_rows.div_(self.rows[:, None].to(total)).div_(self.columns.to(total))

    def inverse_squares(self) -> float:
        """Return the sum of 1 / s^2 over all numbers of the parameter."""
        return float(self.rows.double().pow(-2).sum() * self.columns.double().pow(-2).sum())


def _times(values: Tensor, scales: Tensor) -> Tensor:
    dtype = accumulation_dtype(values.dtype)
    return values.to(dtype) * scales.to(dtype)
