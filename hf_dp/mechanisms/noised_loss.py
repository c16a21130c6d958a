"""DP-SGD's step with a noised loss: two noised sums over one draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_dp.mechanisms.base import Clipped, register_mechanism
from hf_dp.mechanisms.dp_sgd import DpSgd
from hf_dp.plans.noised_loss import NoisedLossPlan
from hf_dp.run.gate import Release


@register_mechanism
class DpSgdNoisedLoss(DpSgd):
    """As :class:`DpSgd`, and ``noised["noised_loss"]`` after each step, which may be below 0."""

    plan_type: ClassVar[type[Any]] = NoisedLossPlan

    def clip(self, batches: Any) -> Clipped:
        """Return the sum of clipped gradients, and that of clipped losses. Not private."""
        run = self.run
        losses = BoundedLosses(
            self.plan.noised_loss_bound, self.plan.loss_unit(run.plan.schedule), run.device
        )
        clipped = self._clip(batches, losses.add)
        return replace(clipped, values=(clipped.values, losses.total))

    def gradients(self, clipped: Clipped, release: Release) -> Mapping[nn.Parameter, Tensor]:
        """Return the gradients as :class:`DpSgd` does, and note ``(sum of clipped losses + N(0,
        (sigma_l B)^2)) / expected_batch_size``."""
        sums, losses = clipped.values
        self.noised = {"noised_loss": release.loss(losses) / self.run.plan.expected_batch_size}
        return super().gradients(replace(clipped, values=sums), release)


class BoundedLosses:
    """The sum of losses, each clipped to [0, bound], over this process's examples of one draw.

    Args:
        bound: the most that one example adds.
        unit: a power of two; each loss is rounded down to a multiple of it, so that no sum of them
            is rounded (:meth:`hf_dp.plans.noised_loss.NoisedLossPlan.loss_unit`).

    Attributes:
        total: the sum so far, (), float64. Not private.
    """

    def __init__(self, bound: float, unit: float, device: torch.device):
        self.bound, self.unit = bound, unit
        self.total = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, losses: Tensor) -> None:
        """Add the losses, (b,), of a physical batch. One that is not finite adds 0."""
        values = losses.double()
        values = torch.where(torch.isfinite(values), values, 0).clamp(0, self.bound)
        self.total += (values / self.unit).floor_().mul_(self.unit).sum()
