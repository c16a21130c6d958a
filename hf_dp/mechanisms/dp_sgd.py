"""DP-SGD's step: noise on the clipped sum, in ``p.grad`` (Li et al., algorithm 1).

Any optimizer then makes it DP-Adam and so on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_dp.accounting import SUM
from hf_dp.mechanisms.base import Clipped, Mechanism, register_mechanism
from hf_dp.plans.dp_sgd import DpSgdPlan
from hf_dp.run.gate import Release


@register_mechanism
class DpSgd(Mechanism):
    """Per-example gradients clipped by the engine, summed, noised once per logical batch."""

    plan_type: ClassVar[type[Any]] = DpSgdPlan

    def prepare(self) -> None:
        self.run.check_engine()

    def clip(self, batches: Any) -> Clipped:
        """Return, by parameter, the sum of clipped gradients: ``sum_i w_i g_i``, norms at most
        C."""
        return self._clip(batches)

    def _clip(self, batches: Any, watch: Callable[[Tensor], object] | None = None) -> Clipped:
        """Clip; ``watch`` gets the losses, (b,), of each physical batch, too."""
        with self.tuner.engine(self.run) as engine:
            loss_sum = self.run.feed(engine, batches, watch)
            sums = engine.collect()
        return Clipped(sums, loss_sum)

    def gradients(self, clipped: Clipped, release: Release) -> Mapping[nn.Parameter, Tensor]:
        """Return ``(clipped sum + N(0, (sigma C)^2)) / B`` for every trainable parameter.

        The noise is drawn once per logical batch, and the divisor is a public constant, also for an
        empty draw.
        """
        for each in self.run.inside:
            each.clipped(clipped.values)
        noised = release.sum(clipped.values)
        for each in self.run.inside:
            each.noised(noised)
        divisor = self.run.plan.expected_batch_size
        for total in noised.values():
            total.div_(divisor)
        numbers = sum(total.numel() for total in noised.values())
        own = {id(total) for total in noised.values()}
        gradients = self.tuner.finish(noised)  # a function of what is noised: free
        as_noised = {id(gradient) for gradient in gradients.values()} == own
        std = release.planned.noise_std(SUM) / divisor
        self.noise_norm = math.sqrt(numbers) * std if as_noised else None
        return {p: gradients.pop(name) for name, p in self._trainable().items()}

    def rehearse(self, batches: Any, optimizer: Any) -> None:
        """Clip made-up batches, and give the optimizer zeros: sums without noise must not reach
        it."""
        with self.tuner.engine(self.run) as engine:
            for batch in batches:
                engine.backward(self.run.losses(batch))
            sums = engine.collect()
        for total in sums.values():
            total.copy_(torch.zeros_like(total))  # which takes what the noise takes
        gradients = self.tuner.finish(sums)
        trained = self._trainable()
        for name, parameter in trained.items():
            parameter.grad = gradients.pop(name).to(parameter.dtype)
        if optimizer is not None:
            optimizer.step()
        for parameter in trained.values():
            parameter.grad = None

    def _trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.run.model.named_parameters() if p.requires_grad}
