"""``release=[...]``: what the user lets out without noise, on purpose. The card names it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_dp.features.base import Inside, Seen, register
from hf_dp.statement.unnoised import CLIPPED_GRADIENT_NORM, TRAINING_LOSS


@register
class Unnoised(Inside):
    """Lets out the training loss, and the norm of the clipped mean before noise.

    Beside that norm stands ``measured_signal_to_noise``, |g|^2 / |z|^2 with the norm as it is.
    """

    _loss: Tensor | None = None
    _signal: float = 0.0

    @classmethod
    def is_asked_for(cls, args: Any) -> bool:
        return bool(args.release)

    def clipped(self, sums: dict[str, Tensor]) -> None:
        if CLIPPED_GRADIENT_NORM in self.args.release:
            squares = [total.double().square().sum() for total in sums.values()]
            norm = float(torch.stack(squares).sum().sqrt()) if squares else 0.0
            self._signal = norm / self.run.plan.expected_batch_size

    def stepped(self, loss_sum: Tensor) -> None:
        if TRAINING_LOSS in self.args.release:
            total = self.run.processes.summed(loss_sum)
            self._loss = total / self.run.plan.expected_batch_size

    def released(self, seen: Seen) -> None:
        seen.loss = self._loss

    def log(self, logs: dict[str, float], seen: Seen) -> None:
        asked_for = CLIPPED_GRADIENT_NORM in self.args.release
        if asked_for and seen.noise_norm is not None and "grad_norm" in logs:
            logs[CLIPPED_GRADIENT_NORM] = self._signal
            logs["measured_signal_to_noise"] = (self._signal / seen.noise_norm) ** 2
