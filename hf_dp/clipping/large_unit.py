"""The gradient of one unit whose rows do not fit into one physical batch.

It is summed over physical batches before it is clipped, once, as the gradient of one example is.
That takes what ordinary training takes for its gradients, in float32: one number a parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_dp.clipping.gradients import Dense, PerExampleGradient, Weights
from hf_dp.clipping.rounding import full_precision


class LargeUnit:
    """Adds up what physical batches give one unit."""

    def __init__(self) -> None:
        self._totals: dict[nn.Parameter, Tensor] = {}
        self._sizes: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    @full_precision()
    def add(self, parameter: nn.Parameter, use: PerExampleGradient) -> None:
        """Add one use of a parameter, whose gradients are of this unit alone."""
        size = use.size()
        once = Weights(torch.ones_like(size))
        known = self._sizes.get(parameter)
        if known is None:
            self._totals[parameter] = size.new_zeros(parameter.shape)
        use.add_weighted_sum(self._totals[parameter], once)
        self._sizes[parameter] = size if known is None else known + size

    def uses(self) -> dict[nn.Parameter, list[PerExampleGradient]]:
        """Return the sums as the gradients of one example. The norm is then taken of the very
        numbers that are added, so their rounding adds nothing."""
        return {
            parameter: [Dense(total[None], owned=True, of_terms=self._sizes[parameter])]
            for parameter, total in self._totals.items()
        }
