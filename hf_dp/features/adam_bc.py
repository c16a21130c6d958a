"""Adam whose second moment is corrected for the noise that DP-SGD added: DP-AdamBC.

The noise in each coordinate of a private gradient has a known variance, which Adam's second moment
holds beside the gradient's own square. Where noise is the larger part, all coordinates get about
the same step, as in SGD. Tang, Shpilevskiy and Lecuyer 2024 (arXiv 2312.14334, algorithm 1) take
the variance off. It is a function of what was released, so it costs no privacy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from hf_dp._arguments import Problems
from hf_dp._validate import invalid, non_negative, positive
from hf_dp.errors import InvalidArgumentError, UnsupportedArgumentError
from hf_dp.features.base import Feature, Seen, register

FLOOR = "adam_bc_floor"
_ADAMS = ("adamw_torch", "adamw_torch_fused")


class DPAdamBC(Optimizer):
    """AdamW that divides by ``sqrt(max(v - noise_variance, floor * noise_variance))``.

    Args:
        params: parameters, or groups of them with ``lr``, ``betas`` and ``weight_decay``.
        noise_variance: of the noise in each coordinate of a gradient, > 0.
        floor: the least denominator, squared, as a share of ``noise_variance``, > 0. The second
            moment strays from its mean by about ``sqrt(1 - beta2)`` of it.
        lr, betas, weight_decay: as in :class:`torch.optim.AdamW`.

    Raises: InvalidArgumentError.
    """

    def __init__(
        self,
        params: Iterable[Any],
        noise_variance: float,
        floor: float,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ):
        self.noise_variance = positive("noise_variance", noise_variance)
        self.floor = positive("floor", floor)
        non_negative("lr", lr)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one step; gradients that are None are passed over."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        least = self.floor * self.noise_variance
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                state["step"] += 1
                count = float(state["step"])
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                second = state["exp_avg_sq"] / (1 - beta2**count)
                second.sub_(self.noise_variance).clamp_(min=least).sqrt_()
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(state["exp_avg"], second, value=-group["lr"] / (1 - beta1**count))
        return loss


def corrected(optimizer: Optimizer, noise_std: float, batch_size: float, floor: float) -> DPAdamBC:
    """Return the optimizer that trains what ``optimizer``, an AdamW, was made for.

    Args: noise_std: on the sum of gradients. batch_size: what the sum is divided by.
    """
    groups = [
        {name: group[name] for name in ("params", "lr", "betas", "weight_decay")}
        for group in optimizer.param_groups
    ]
    return DPAdamBC(groups, (noise_std / batch_size) ** 2, floor)


@register
class AdamBC(Feature):
    """``adam_bc_floor``: Adam that is corrected for the noise."""

    @classmethod
    def is_asked_for(cls, args: Any) -> bool:
        return args.adam_bc_floor is not None

    @classmethod
    def problems(cls, args: Any, found: Problems) -> None:
        """Note another optimizer, and a clipped gradient, whose noise is not known."""
        optim = getattr(args.optim, "value", args.optim)
        if cls.is_asked_for(args) and optim not in _ADAMS:
            found.unsupported(
                FLOOR,
                f"to be unset with optim={optim!r}",
                'It corrects Adam. Remove it, or use optim="adamw_torch".',
            )
        if cls.is_asked_for(args) and args.clip_noised_gradient:
            found.unsupported(
                FLOOR,
                "to be unset with clip_noised_gradient",
                "A clipped gradient has noise of no known variance. Remove one of the two.",
            )

    def begin(self, seen: Seen) -> None:
        """Raise UnsupportedArgumentError where the noise in a gradient is not that of the sum, or
        where the user made the optimizer."""
        if seen.optimizer is not None:
            raise _refused(
                self.args,
                "to be unset with an optimizer of your own",
                "Pass hf_dp.features.adam_bc.DPAdamBC as that optimizer, or let DPTrainer make it.",
            )
        if not seen.tuner.gradients_are_noised_sums:
            raise _refused(
                self.args,
                "to be unset with this peft_config",
                "Its gradients are made of several noised sums, whose noise is not alike in all "
                "coordinates. Remove it.",
            )

    def optimizer(self, optimizer: Optimizer, seen: Seen) -> Optimizer:
        plan = seen.plan
        return corrected(
            optimizer, plan.noise_std, plan.expected_batch_size, self.args.adam_bc_floor
        )

    def words(self) -> dict[str, Any]:
        return {FLOOR: self.args.adam_bc_floor}


def _refused(args: Any, expected: str, move: str) -> InvalidArgumentError:
    return invalid(FLOOR, args.adam_bc_floor, expected, move, UnsupportedArgumentError)
