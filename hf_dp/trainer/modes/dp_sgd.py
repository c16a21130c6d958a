"""DP-SGD: noise on the clipped sum, in ``p.grad``; any optimizer then makes it DP-Adam and so on
(Li et al., algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hf_dp.accounting import TRAINING
from hf_dp.noise import SecretRandomness
from hf_dp.plan import PrivacyPlan
from hf_dp.trainer.modes.base import Mode, nominal_epoch
from hf_dp.trainer.run_ledger import RunLedger


class DpSgd(Mode):
    """Per-example gradients clipped by the engine, summed, noised once per logical batch."""

    def prepare(self, trainer: Any) -> None:
        trainer.check_engine()

    def loader(self, trainer: Any) -> DataLoader:
        plan, _ = trainer.private_run()
        return trainer.private_batches(plan.sampler(nominal_epoch(plan)))

    def step(self, trainer: Any, inputs: Any) -> Tensor:
        plan, run = trainer.private_run()
        loss_sum, sums = self.clipped_sums(trainer, inputs)
        trainable = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
        release_gradient(trainable, sums, plan, trainer.randomness, run, trainer.choice.finish)
        return loss_sum

    def clipped_sums(self, trainer: Any, inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of losses, and by parameter the sum of clipped gradients: neither is private."""
        plan, _ = trainer.private_run()
        with trainer.engine(plan) as engine:
            loss_sum = trainer.feed(engine, inputs)
            return loss_sum, engine.collect()


@torch.no_grad()
def release_gradient(
    parameters: Mapping[str, nn.Parameter],
    sums: dict[str, Tensor],
    plan: PrivacyPlan,
    randomness: SecretRandomness,
    run: RunLedger,
    finish: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
) -> None:
    """``p.grad = (clipped sum + N(0, (noise_multiplier C)^2)) / expected_batch_size`` for every
    trainable parameter.

    The noise is drawn once per logical batch and the divisor is a public constant, also for an
    empty draw. The step is in the durable ledger before any ``p.grad`` is set: whatever is killed
    afterwards, nothing unrecorded was visible.
    """
    for total in sums.values():
        total.add_(randomness.gaussian_like(total, plan.noise_std)).div_(plan.expected_batch_size)
    run.append(plan.event(steps=1), TRAINING)
    if finish is not None:  # a function of what is noised: free
        sums = finish(sums)
    for name, parameter in parameters.items():
        parameter.grad = sums.pop(name).to(parameter.dtype)
