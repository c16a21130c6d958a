"""A rule: how a module runs inside the engine, and the gradients of its parameters from that."""

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

Kept = tuple[Tensor | None, ...]
Found = Mapping[str, Tensor | PerExampleGradient]


@dataclass(frozen=True)
class Use:
    """One forward of a module that has a rule.

    Attributes:
        own: the names of its parameters that train.
    """

    tape: Tape
    module: Any
    own: tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """The module runs on detached parameters, so autograd computes the gradients of its inputs.

    An identity after it keeps what the parameters' gradients need, and forms them in backward.

    Args:
        run: ``(use, *args, **kwargs) -> (output, kept)``, with the forward's arguments. Each kept
            tensor has the examples in its first dimension.
        gradients: ``(use, kept, output_grad) -> {parameter name: per-example gradient}`` for at
            least ``use.own``. A gradient is a tensor (b, *shape) or a
            :class:`~hf_dp.clipping.gradients.PerExampleGradient`. The tensors passed in have the
            examples in their first dimension, even if the module worked on flattened (b * T, d)
            inputs.
        flattens: whether an input (b * T, d) means the same as (b, T, d).
        is_fresh: whether the output has memory of its own that nothing reads in backward, so that
            a model may change it in place (Longformer does).
    """

    run: Callable[..., tuple[Tensor, Kept]]
    gradients: Callable[[Use, Any, Tensor], Found]
    flattens: bool = True
    is_fresh: bool = True

    def __call__(self, tape: Tape, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        parameters = module._parameters
        own = {name: p for name, p in parameters.items() if p is not None and p.requires_grad}
        use = Use(tape, module, tuple(own))
        for name, parameter in own.items():
            parameters[name] = tape.constant(parameter)  # type: ignore[assignment]
        try:
            output, kept = self.run(use, *args, **kwargs)
        finally:
            parameters.update(own)
        if not own or not torch.is_grad_enabled():
            return output
        for tensor in kept:
            tape.refuse_parameter(module, tensor)
        if not isinstance(output, Tensor):
            raise UnsupportedModelError(
                f"{tape.describe(module)} returned a {type(output).__name__}, but its clipping "
                "rule expects one tensor. Remove the rule: a module without one is differentiated "
                "example by example."
            )
        tape.note_forward(module, *own)
        return _Kept.apply(output, next(iter(own.values())), self, use, *kept)


class _Kept(torch.autograd.Function):
    """Identity that keeps a rule's tensors and, in backward, captures the gradients from them.

    ``anchor``, a parameter of the module, is an input so that backward reaches this in any case.
    """

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, anchor: Tensor, rule: Rule, use: Use, *kept: Tensor | None
    ) -> Tensor:
        ctx.rule, ctx.use = rule, use
        ctx.save_for_backward(*kept)
        # `.data`, so that autograd does not treat it as a view, which must not be changed in place.
        return output.data if rule.is_fresh else passed_on(output, use.module)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        rule: Rule = ctx.rule
        use: Use = ctx.use
        tape, module = use.tape, use.module
        saved = ctx.saved_tensors
        kept = [t if t is None else tape.by_example(module, t, rule.flattens) for t in saved]
        found = rule.gradients(use, kept, tape.by_example(module, grad, rule.flattens))
        missing = sorted(set(use.own) - set(found))
        if missing:
            raise UnsupportedModelError(
                f"The clipping rule of {tape.describe(module)} returned gradients for "
                f"{sorted(found)} but none for its trainable {missing}. Return them from its "
                "gradients function, or freeze these parameters (requires_grad_(False))."
            )
        for name in use.own:
            tape.capture(module, name, found[name])
        return grad, None, None, None, *[None] * len(saved)


def as_it_is(use: Use, input: Tensor) -> tuple[Tensor, tuple[Tensor]]:
    """Run the module's own forward; keep its input."""
    return type(use.module).forward(use.module, input), (input,)
