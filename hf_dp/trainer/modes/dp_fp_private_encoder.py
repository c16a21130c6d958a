"""DP-FP's last layer above an encoder that is trained by DP-SGD.

Each step releases a noisy sum of clipped encoder gradients, and noisy rows from which the last
layer's gradient follows. Rows show who was drawn. So the sum may be taken for that of a secret
Poisson sample only if its draw is another, independent one (``separate``); with one draw for both,
sum and row of a drawn record are one Gaussian mechanism that is seen (``shared``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp._validate import invalid
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.forward_plan import SHARED
from hf_dp.trainer.modes.base import nominal_epoch
from hf_dp.trainer.modes.dp_sgd import DpSgd, release_gradient
from hf_dp.trainer.modes.last_layer import LastLayer


class PrivateEncoder(DpSgd):
    """DP-SGD below the noise, an ordinary gradient from released rows above it."""

    _last: LastLayer
    _row_draws: Iterator[Any] | None = None

    def start(self, trainer: Any, checkpoint: str | None) -> None:
        plan, _ = trainer.private_run()
        self._last = LastLayer(trainer)
        if trainer.choice.engine(trainer.model, plan) is not None:
            raise invalid(
                "peft_config",
                type(trainer.choice).__name__,
                "to be FROST, a stock adapter or None with dp_fp_variant='private_encoder'",
                "This one clips in a way of its own, the last layer included.",
                UnsupportedArgumentError,
            )

    def prepare(self, trainer: Any) -> None:
        with self._below_only():
            super().prepare(trainer)

    def step(self, trainer: Any, inputs: Any) -> Tensor:
        plan, run = trainer.private_run()
        with self._below_only() as below:
            loss_sum, sums = self.clipped_sums(trainer, inputs)
        rows, labels = self._last.rows_of(
            trainer, inputs if plan.forward.draws == SHARED else self._draw(trainer)
        )
        released = self._last.clipped(rows, labels)
        released = released + trainer.randomness.gaussian_like(released, plan.record_noise_std)
        release_gradient(
            below, sums, plan, trainer.randomness, run, trainer.choice.finish
        )  # records the step, rows included
        with trainer.randomness.streams():
            loss = self._last.loss(released, labels) / plan.expected_batch_size
            for parameter, gradient in zip(
                self._last.parameters,
                torch.autograd.grad(loss, self._last.parameters, allow_unused=True),
                strict=True,
            ):
                parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient
        return loss_sum

    def _draw(self, trainer: Any) -> Any:
        """The next draw for rows, independent of that for gradients."""
        if self._row_draws is None:
            self._row_draws = self._draws(trainer)
        return next(self._row_draws)

    def _draws(self, trainer: Any) -> Iterator[Any]:
        plan, _ = trainer.private_run()
        while True:
            yield from trainer.private_batches(plan.sampler(nominal_epoch(plan)))

    @contextmanager
    def _below_only(self) -> Iterator[dict[str, nn.Parameter]]:
        """Inside, the last layer is frozen; gives what trains below it, by name."""
        above = {p: p.requires_grad for p in self._last.parameters}
        try:
            for parameter in above:
                parameter.requires_grad_(False)
            yield {name: p for name, p in self._last.model.named_parameters() if p.requires_grad}
        finally:
            for parameter, trains in above.items():
                parameter.requires_grad_(trains)
