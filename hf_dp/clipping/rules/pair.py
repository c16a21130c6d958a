"""A rule as a pair of functions: what to keep of the inputs, and the gradients from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.clipping.gradients import PerExampleGradient
from hf_dp.clipping.sharding import passed_on
from hf_dp.clipping.tape import Tape
from hf_dp.errors import UnsupportedModelError

Keep = Callable[..., tuple[Tensor, ...]]
Gradients = Callable[[Any, tuple[Tensor, ...], Tensor], Mapping[str, "Tensor | PerExampleGradient"]]


@dataclass(frozen=True)
class PairRule:
    """A rule that runs the module's own forward on detached parameters.

    Autograd then computes the gradients of the inputs and no others.

    Args:
        keep: ``(module, *args, **kwargs) -> tensors`` that the gradients need, each with the
            examples in its first dimension.
        gradients: ``(module, kept, output_grad) -> {parameter name: per-example gradient}`` for at
            least the trainable parameters of the module. A gradient is a tensor (b, *shape) or a
            :class:`~hf_dp.clipping.gradients.PerExampleGradient`. The tensors passed in have the
            examples in their first dimension, even if the module worked on flattened (b * T, d)
            inputs.
        flattens: whether an input (b * T, d) means the same as (b, T, d).
    """

    keep: Keep
    gradients: Gradients
    flattens: bool = True

    def __call__(self, tape: Tape, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = {name: p for name, p in module.named_parameters(recurse=False) if p.requires_grad}
        if not torch.is_grad_enabled():
            return type(module).forward(module, *args, **kwargs)
        kept = self.keep(module, *args, **kwargs)
        for tensor in kept:
            tape.refuse_parameter(module, tensor)
        tape.note_forward(module, *own)
        for name, parameter in own.items():
            module._parameters[name] = parameter.detach()  # type: ignore[assignment]
        try:
            output = type(module).forward(module, *args, **kwargs)
        finally:
            module._parameters.update(own)
        if not isinstance(output, Tensor):
            raise UnsupportedModelError(
                f"{tape.describe(module)} returned a {type(output).__name__}, but its clipping "
                "rule expects one tensor. Remove the rule: a module without one is differentiated "
                "example by example."
            )
        return _Kept.apply(output, next(iter(own.values())), self, module, tape, tuple(own), *kept)


class _Kept(torch.autograd.Function):
    """Identity that keeps a rule's tensors and, in backward, captures the gradients from them.

    ``anchor``, a parameter of the module, is an input so that backward reaches this in any case.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        anchor: Tensor,
        rule: PairRule,
        module: nn.Module,
        tape: Tape,
        own: tuple[str, ...],
        *kept: Tensor,
    ) -> Tensor:
        ctx.rule, ctx.module, ctx.tape, ctx.own = rule, module, tape, own
        ctx.save_for_backward(*kept)
        return passed_on(output, module)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        tape: Tape = ctx.tape
        kept = tuple(
            tape.by_example(ctx.module, t.detach(), ctx.rule.flattens) for t in ctx.saved_tensors
        )
        found = ctx.rule.gradients(
            ctx.module, kept, tape.by_example(ctx.module, grad, ctx.rule.flattens)
        )
        missing = sorted(set(ctx.own) - set(found))
        if missing:
            raise UnsupportedModelError(
                f"The clipping rule of {tape.describe(ctx.module)} returned gradients for "
                f"{sorted(found)} but none for its trainable {missing}. Return them from its "
                "gradients function, or freeze these parameters (requires_grad_(False))."
            )
        for name in ctx.own:
            tape.capture(ctx.module, name, found[name])
        return grad, None, None, None, None, None, *[None] * len(kept)
