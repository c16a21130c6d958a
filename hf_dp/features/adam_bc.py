"""Adam whose second moment is corrected for the noise that DP-SGD added: DP-AdamBC.

The noise in each coordinate of a private gradient has a known variance, which Adam's second moment
holds beside the gradient's own square. Where noise is the larger part, all coordinates are divided
by about the same number, as in SGD. Tang, Shpilevskiy and Lecuyer 2024 (arXiv 2312.14334,
algorithm 1) take the variance off. It is a function of what was released, so it costs no privacy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from hf_dp._arguments import Need
from hf_dp._validate import invalid, non_negative, positive
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.features.base import Feature, Seen, register

FLOOR = "adam_bc_floor"


class DPAdamBC(Optimizer):
    """AdamW that divides by ``sqrt(max(v - noise_variance, floor * noise_variance))``.

    ``noise_variance``, > 0, is that of each coordinate of a gradient. The second moment strays from
    its mean by about ``sqrt(1 - beta2)`` of it.
    """

    def __init__(
        self,
        params: ParamsT,
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
        with torch.enable_grad():
            loss = None if closure is None else closure()
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


@register
class AdamBC(Feature):
    """``adam_bc_floor``: Adam that is corrected for the noise."""

    asked_for_by = FLOOR
    NEEDS = (
        Need(
            FLOOR,
            "optim",
            ("adamw_torch", "adamw_torch_fused"),
            'It corrects Adam. Remove it, or use optim="adamw_torch".',
            UnsupportedArgumentError,
        ),
        Need(
            FLOOR,
            "clip_noised_gradient",
            (False,),
            "The variance of the noise in a clipped gradient is not known. Remove one of the two.",
            UnsupportedArgumentError,
        ),
    )

    def begin(self, seen: Seen) -> None:
        """Refuse an optimizer of one's own, and gradients whose noise is not that of the sum."""
        floor, expected = self.args.adam_bc_floor, ""
        if seen.optimizer is not None:
            expected = "to be unset with an optimizer of your own"
        elif not seen.tuner.gradients_are_noised_sums:
            expected = (
                "to be unset with this peft_config, whose gradients come from several noised sums"
            )
        if expected:
            raise invalid(FLOOR, floor, expected, "Remove it.", UnsupportedArgumentError)

    def optimizer(self, optimizer: Optimizer, seen: Seen) -> Optimizer:
        """Return the optimizer that trains what ``optimizer``, an AdamW, was made for."""
        groups = [
            {name: group[name] for name in ("params", "lr", "betas", "weight_decay")}
            for group in optimizer.param_groups
        ]
        noise_std = seen.plan.noise_std / seen.plan.expected_batch_size
        return DPAdamBC(groups, noise_std**2, self.args.adam_bc_floor)

    def start(self, seen: Seen) -> None:
        """Refuse an optimizer that did not come through :meth:`optimizer`."""
        if not isinstance(getattr(seen.optimizer, "optimizer", seen.optimizer), DPAdamBC):
            expected = "to be unset where create_optimizer does not call super().create_optimizer()"
            move = "The optimizer would not be corrected. Call it, or remove this."
            raise invalid(FLOOR, self.args.adam_bc_floor, expected, move, UnsupportedArgumentError)

    def words(self) -> dict[str, float]:
        return {FLOOR: self.args.adam_bc_floor}
