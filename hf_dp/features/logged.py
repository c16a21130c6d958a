"""What a private run logs besides what Trainer logs: functions of what was released with noise."""

from __future__ import annotations

from torch import Tensor

from hf_dp.features.base import Feature, Seen, register


@register
class NoisedNumbers(Feature):
    """Logs what a step releases beside the gradients: means over the steps since the last log."""

    def __init__(self, args: object):
        super().__init__(args)
        self._totals: dict[str, Tensor] = {}
        self._steps = 0

    def start(self, seen: Seen) -> None:
        self._totals, self._steps = {}, 0

    def released(self, seen: Seen) -> None:
        self._steps += 1
        for name, value in seen.noised.items():
            self._totals[name] = self._totals.get(name, 0) + value.double()

    def log(self, logs: dict[str, float], seen: Seen) -> None:
        if self._steps and ("loss" in logs or "train_loss" in logs):  # and not of an evaluation
            logs |= {name: float(total) / self._steps for name, total in self._totals.items()}
            self._totals, self._steps = {}, 0


@register
class SignalToNoise(Feature):
    """Logs ``signal_to_noise`` beside the norm of a noised gradient.

    It estimates |g|^2 / |z|^2, the square of Li et al.'s ratio (section 3.1.1), from that norm;
    where there is hardly any signal, it may be below 0.
    """

    def log(self, logs: dict[str, float], seen: Seen) -> None:
        if seen.noise_norm is not None and "grad_norm" in logs:
            # E|g + z|^2 = |g|^2 + E|z|^2: an estimate from what is released anyway.
            logs["signal_to_noise"] = (float(logs["grad_norm"]) / seen.noise_norm) ** 2 - 1
