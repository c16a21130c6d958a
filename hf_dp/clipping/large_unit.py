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
        self._slacks: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    @full_precision()
    def add(self, parameter: nn.Parameter, use: PerExampleGradient) -> None:
        """Add one use of a parameter, whose gradients are of this unit alone."""
        slack = use.slack()
        once = Weights(torch.ones_like(slack))
        known = self._slacks.get(parameter)
        if known is None:
            self._totals[parameter] = slack.new_zeros(parameter.shape)
        use.add_weighted_sum(self._totals[parameter], once)
        self._slacks[parameter] = slack if known is None else known + slack

    def uses(self) -> dict[nn.Parameter, list[PerExampleGradient]]:
        """Return the sums as the gradients of one example. The norm is then taken of the very
        numbers that are added, so their rounding adds nothing."""
        return {
            parameter: [Dense(total[None], owned=True, of_factors=self._slacks[parameter])]
            for parameter, total in self._totals.items()
        }
