"""Small features that see what is not noised: what a user lets out, and how many rows fit."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from hf_dp._dataclasses import default_of
from hf_dp.features.base import Inside, Seen, register
from hf_dp.mechanisms import Mechanism
from hf_dp.statement.facts import CLIPPED_GRADIENT_NORM, TRAINING_LOSS


@register
class Unnoised(Inside):
    """``release=[...]``: what the user lets out without noise, on purpose. The card names it.

    It is the training loss, and the norm of the clipped mean before noise. Beside that norm stands
    ``measured_signal_to_noise``, |g|^2 / |z|^2 with the norm as it is.
    """

    asked_for_by = "release"
    _loss: Tensor | None = None
    _signal: float = 0.0

    def clipped(self, sums: dict[str, Tensor]) -> None:
        if CLIPPED_GRADIENT_NORM in self.args.release:
            squares = sum(float(total.double().square().sum()) for total in sums.values())
            self._signal = squares**0.5 / self.run.plan.expected_batch_size

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


@register
class PhysicalBatch(Inside):
    """``auto_physical_batch_size``: the largest physical batch that fits, found before the steps
    and written into the arguments, once.

    ``per_device_train_batch_size`` is an upper limit, unless it is the default.
    """

    asked_for_by = "auto_physical_batch_size"
    _found = False

    def fit(self, mechanism: Mechanism, optimizer: Optimizer | None) -> None:
        if self._found:
            return
        self._found, args = True, self.args
        given = args.per_device_train_batch_size
        default = default_of(type(args).__dataclass_fields__["per_device_train_batch_size"])
        args.per_device_train_batch_size = mechanism.find_physical_batch(
            optimizer,
            length=args.auto_physical_batch_length,
            most_examples=None if given == default else given,
        )
