"""DP-FP as published (Du and Mi 2021, Algorithm 1).

No epsilon is established for it: the encoder's gradient is computed from activations that were not
noised (:attr:`hf_dp.accounting.PublishedForwardNoise.reasons`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from hf_dp.mechanisms.base import Clipped, Mechanism, register_mechanism, zero
from hf_dp.mechanisms.dp_fp.last_layer import last_layer
from hf_dp.mechanisms.dp_fp.representation import PrivateRepresentation
from hf_dp.plans.dp_fp import PublishedPlan
from hf_dp.run.gate import Release

logger = logging.get_logger(__name__)


@register_mechanism
class Published(Mechanism):
    """Clips and noises in the forward pass of M joined micro-batches.

    Backward pass and optimizer are ordinary ones.
    """

    plan_type = PublishedPlan
    gradients_are_noised = False
    needs_whole_weights = "DP-FP as published trains on gradients that autograd writes."
    _representation: PrivateRepresentation

    def start(self, checkpoint: str | None = None) -> None:
        _, layer = last_layer(self.run)
        self._representation = PrivateRepresentation(layer, self.plan.vector_clipping_norm)
        logger.warning(
            "DP-FP as published: NO differential privacy guarantee is established for this run,\n"
            "because un-noised gradients train the encoder. dp_fp_variant='frozen' and "
            "'private_encoder' have a guarantee."
        )

    def clip(self, batches: Any) -> Clipped:
        """Return the batches as they are: this mechanism clips in the forward pass."""
        return Clipped(batches, zero(self.run))

    def gradients(self, clipped: Clipped, release: Release) -> Mapping[nn.Parameter, Tensor]:
        """Return the gradient of all M micro-batches at once.

        Their losses add up, so one padded batch gives the same as M passes.
        """
        run = self.run
        with run.randomness.streams():
            for batch in clipped.values:
                with self._representation.noising(release.vectors):
                    losses = run.losses(batch)
                    (losses.sum() / run.plan.expected_batch_size).backward()
                clipped.loss_sum += losses.detach().sum()
        # A step without examples is still a step: Adam's moments decay.
        return {
            p: run.processes.summed(torch.zeros_like(p) if p.grad is None else p.grad)
            for p in run.model.parameters()
            if p.requires_grad
        }
