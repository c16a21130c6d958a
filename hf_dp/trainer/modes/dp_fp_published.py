"""DP-FP as published (Du and Mi 2021, Algorithm 1). No epsilon is established for it: the encoder's
gradient is computed from activations that were not noised.
(:data:`hf_dp.cards.forward_wording.NOT_ESTABLISHED_REASONS`.)"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.utils import logging

from hf_dp.accounting import TRAINING
from hf_dp.representation import PrivateRepresentation
from hf_dp.trainer.modes.base import Mode, nominal_epoch
from hf_dp.trainer.modes.last_layer import last_layer

logger = logging.get_logger(__name__)


class PublishedForward(Mode):
    """Clip and noise in the forward pass of M joined micro-batches; then an ordinary backward pass
    and optimizer."""

    _representation: PrivateRepresentation

    def start(self, trainer: Any, checkpoint: str | None) -> None:
        plan, _ = trainer.private_run()
        _, layer = last_layer(trainer)
        self._representation = PrivateRepresentation(
            layer, plan.record_clipping_norm, plan.record_noise_std, trainer.randomness
        )
        logger.warning(
            "DP-FP as published: NO differential privacy guarantee is established for this run. "
            "The encoder is trained by\ngradients that were not noised; dp_fp_variant='frozen' or "
            "'private_encoder' have a guarantee."
        )

    def loader(self, trainer: Any) -> DataLoader:
        plan, _ = trainer.private_run()
        return trainer.private_batches(plan.micro_batch_sampler(nominal_epoch(plan)))

    def step(self, trainer: Any, inputs: Any) -> Tensor:
        """The gradient of all M micro-batches at once: their losses add up, so one padded batch
        gives what M passes give."""
        plan, run = trainer.private_run()
        run.append(plan.event(steps=1), TRAINING)
        total = torch.zeros((), device=trainer.args.device)
        with trainer.randomness.streams():
            for batch in inputs:
                with self._representation.noising():
                    losses = trainer.losses_of(batch)
                    (losses.sum() / plan.expected_batch_size).backward()
                total += losses.detach().sum()
        for (
            parameter
        ) in trainer.model.parameters():  # an empty step is a step: Adam's moments decay
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return total
