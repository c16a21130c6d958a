"""A learning rate that falls with the signal in the noised gradients: a noise-aware schedule.

Let g be the gradient of a step, z its noise, and L the curvature. By the descent lemma a step of
size eta along g + z lowers the loss, on average, by at least

    eta |g|^2 - eta^2 (L / 2) (|g|^2 + E|z|^2),

which is largest at eta = gain / L with gain = |g|^2 / (|g|^2 + E|z|^2). As a model comes to fit its
rows, |g| falls and the noise does not, so the best learning rate falls with the gain. The gain is
estimated from what the step releases anyway: since E|g + z|^2 = |g|^2 + E|z|^2, it is
1 - E|z|^2 / |g + z|^2, with a moving average in the denominator. That costs no privacy. 1 / L is
not known; the learning rate that was set stands for its product with the largest gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from hf_dp._validate import invalid
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.trainer.argument_checks import Problems

FLOOR = "noise_aware_floor"
# A moving average over about ten steps: few enough to follow the gradient, and enough that one
# small draw does not count.
_DECAY = 0.9
_STATE = "noise_aware"


class NoiseAware:
    """Scale the learning rate of each step of an optimizer by its gain / the largest gain so far.

    What it remembers is in the optimizer's first parameter group, so checkpoints hold it.

    Args:
        optimizer: any; its groups have ``lr``.
        noise_norm: returns the root of E|z|^2 of the gradients that are set now.
        floor: the least factor, from 0 to 1.
    """

    def __init__(self, optimizer: Optimizer, noise_norm: Callable[[], float | None], floor: float):
        self.optimizer, self.noise_norm, self.floor = optimizer, noise_norm, floor
        self.factor = 1.0  # of the last step
        self._rates: list[Any] = []
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        noise = self.noise_norm()
        squares = [
            p.grad.float().square().sum()
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        self._rates = [group["lr"] for group in optimizer.param_groups]
        if noise is None or not squares:
            self.factor = 1.0
            return
        self.factor = self._next_factor(float(torch.stack(squares).sum()), noise**2)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.factor

    def _next_factor(self, squared_norm: float, squared_noise: float) -> float:
        state = self.optimizer.param_groups[0].setdefault(
            _STATE, {"mean": 0.0, "steps": 0, "most": 0.0}
        )
        state["steps"] += 1
        state["mean"] += (1 - _DECAY) * (squared_norm - state["mean"])
        mean = state["mean"] / (1 - _DECAY ** state["steps"])  # as Adam corrects its own
        gain = max(1 - squared_noise / mean, 0.0) if mean > 0 else 0.0
        state["most"] = max(state["most"], gain)
        return max(gain / state["most"] if state["most"] else 0.0, self.floor)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # What is scheduled stays what the scheduler knows.
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate


def noise_aware_problems(args: Any) -> Problems:
    """Return what does not go with ``noise_aware_floor``."""
    floor = args.noise_aware_floor
    if floor is None:
        return {}
    number = isinstance(floor, (int, float)) and not isinstance(floor, bool)
    if not number or not math.isfinite(floor) or not 0 <= floor <= 1:
        return {FLOOR: invalid(FLOOR, floor, "to be from 0 to 1", "0.1 is a first value to try.")}
    if args.clip_noised_gradient:
        return {
            FLOOR: invalid(
                FLOOR,
                floor,
                "to be unset with clip_noised_gradient",
                "The norm of a clipped gradient does not tell its signal. Remove one of the two.",
                UnsupportedArgumentError,
            )
        }
    return {}
