"""DP-FP's last layer above an encoder that is trained by DP-SGD.

Each step releases a noisy sum of clipped encoder gradients, and noisy vectors from which the last
layer's gradient follows. Vectors show which examples were drawn. The sum therefore counts as that
of a secret Poisson sample only if the vectors come from an independent draw of their own
(``separate``). With one draw for both (``shared``), sum and vector of a drawn example are one
Gaussian mechanism, and that the example was drawn is visible.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp._validate import invalid
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.mechanisms.base import Clipped, register_mechanism
from hf_dp.mechanisms.dp_fp.last_layer import LastLayer
from hf_dp.mechanisms.dp_sgd import DpSgd
from hf_dp.plans.dp_fp import SHARED, PrivateEncoderPlan
from hf_dp.run.gate import Release


@register_mechanism
class PrivateEncoder(DpSgd):
    """DP-SGD below the noise, and an ordinary gradient from released vectors above it."""

    plan_type = PrivateEncoderPlan
    needs_whole_weights = "DP-FP with a private encoder trains the last layer on released vectors."
    _last: LastLayer
    _vector_draws: Iterator[Any] | None = None

    def start(self, checkpoint: str | None = None) -> None:
        self._last = LastLayer(self.run, self.plan)
        if self.tuner.clips_in_its_own_way:
            raise invalid(
                "peft_config",
                type(self.tuner).__name__,
                "to be FROST, a stock adapter or None with dp_fp_variant='private_encoder'",
                "This one clips in its own way, including the last layer.",
                UnsupportedArgumentError,
            )

    def prepare(self) -> None:
        with self._below_only():
            super().prepare()

    def rehearse(self, batches: Any, optimizer: Any) -> None:
        with self._below_only():
            super().rehearse(batches, optimizer)

    def clip(self, batches: Any) -> Clipped:
        """Return the clipped sum of the encoder's gradients, and clipped vectors with labels."""
        with self._below_only():
            below = super().clip(batches)
        vectors, labels = self._last.vectors_of(
            batches if self.plan.draws == SHARED else self._vector_draw()
        )
        return Clipped((below, self._last.clipped(vectors, labels), labels), below.loss_sum)

    def gradients(self, clipped: Clipped, release: Release) -> Mapping[nn.Parameter, Tensor]:
        below, vectors, labels = clipped.values
        vectors = release.vectors(vectors)
        with self._below_only():
            gradients = dict(super().gradients(below, release))
        with self.run.randomness.streams():
            loss = self._last.loss(vectors, labels) / self.run.plan.expected_batch_size
            above = self._last.parameters
            found = torch.autograd.grad(loss, above, allow_unused=True)
        for parameter, gradient in zip(above, found, strict=True):
            own = torch.zeros_like(parameter) if gradient is None else gradient
            gradients[parameter] = self.run.processes.summed(own)  # of released vectors: free
        return gradients

    def _vector_draw(self) -> Any:
        """Return the next draw for vectors, independent of the draw for gradients."""
        if self._vector_draws is None:
            self._vector_draws = self._endless()
        return next(self._vector_draws)

    @contextmanager
    def _below_only(self) -> Iterator[None]:
        """Freeze the last layer inside."""
        above = {p: p.requires_grad for p in self._last.parameters}
        try:
            for parameter in above:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter, trains in above.items():
                parameter.requires_grad_(trains)
