"""Per-example gradients one at a time: the oracle of the tests and of the self-check, and the fallback for a module
that owns trainable parameters but has no rule.

The fallback lets the module run as it is, with its *own* parameters detached (children keep their rules), and keeps its
inputs; once backward has delivered its output gradients, the module is run again for each example and differentiated
with respect to its own parameters only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hf_dp.clipping.recorder import Tape
from hf_dp.clipping.uses import Dense, accumulation_dtype
from hf_dp.errors import UnsupportedModelError


def per_example_gradients(losses: Tensor, parameters: Mapping[str, nn.Parameter]) -> Iterator[dict[str, Tensor]]:
    """The gradient of each loss in turn, ``{name: tensor like the parameter}``, by one backward pass an example.

    Args: losses: (b,), of a forward that ran without the engine. Unused parameters get zeros. Keeps the graph.
    """
    for loss in losses:
        gradients = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
        yield {
            name: torch.zeros_like(parameter) if gradient is None else gradient
            for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
        }


@dataclass(eq=False)
class OwnerCall:
    """One forward of a module without a rule, to be differentiated example by example after backward."""

    module: nn.Module
    parameters: dict[str, nn.Parameter]
    spec: pytree.TreeSpec
    arguments: list[Any]  # leaves of (args, kwargs); tensors are replaced by None and come from the autograd graph
    autocast: tuple[str, bool, torch.dtype]
    tensors: tuple[Tensor, ...] = ()
    output_grads: dict[int, Tensor] = field(default_factory=dict)

    def run(self, parameters: Mapping[str, Tensor], leaves: Sequence[Any]) -> list[Any]:
        """The module's output leaves for these parameters and argument leaves."""
        args, kwargs = pytree.tree_unflatten(list(leaves), self.spec)
        device, enabled, dtype = self.autocast
        with torch.autocast(device, enabled=enabled, dtype=dtype):
            # Tied parameters stay apart: a child that shares one has recorded its own use of it.
            output = torch.func.functional_call(self.module, dict(parameters), args, kwargs, tie_weights=False)
        return pytree.tree_leaves(output)

    def leaves(self) -> list[Any]:
        tensors = iter(self.tensors)
        return [next(tensors) if leaf is _TENSOR else leaf for leaf in self.arguments]


_TENSOR = object()


def unknown_module(tape: Tape, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Forward of a module without a rule: as ever, but its own parameters' gradients are taken per example later."""
    if not torch.is_grad_enabled():
        return original(module, *args, **kwargs)
    own = {name: p for name, p in module.named_parameters(recurse=False) if p.requires_grad}
    before = _random_state(next(iter(own.values())).device)
    with _detached(module, own):
        output = original(module, *args, **kwargs)
    after = _random_state(next(iter(own.values())).device)
    if any(not torch.equal(x, y) for x, y in zip(before, after, strict=True)):
        # Replaying the draws needs the whole batch at once, where 0 * NaN would carry one example's NaN to all others.
        raise UnsupportedModelError(
            f"{type(module).__name__} has no clipping rule and draws random numbers (dropout?), so it cannot be run again "
            f"example by example. Set its dropout to 0 or freeze its parameters {sorted(own)} (requires_grad_(False))."
        )
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    device = next(iter(own.values())).device.type
    call = OwnerCall(
        module,
        own,
        spec,
        [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves],
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),
    )
    outputs, output_spec = pytree.tree_flatten(output)
    opaque = [leaf for leaf in outputs if not isinstance(leaf, (Tensor, bool, int, float, str, type(None)))]
    if opaque:
        raise UnsupportedModelError(
            f"{type(module).__name__} has no clipping rule and returns a {type(opaque[0]).__name__}, into which the engine "
            f"cannot see, so the gradients of its parameters {sorted(own)} are not known. Freeze them (requires_grad_(False))."
        )
    anchor = next(iter(own.values()))
    captured = [
        _Capture.apply(leaf, anchor, call, tape, position, *tensors)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
        else leaf
        for position, leaf in enumerate(outputs)
    ]
    return pytree.tree_unflatten(captured, output_spec)


class _Capture(torch.autograd.Function):
    """Identity that notes its output gradient. The owner's parameter is an input so that it records in any case."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, anchor: Tensor, call: OwnerCall, tape: Tape, position: int, *tensors: Tensor
    ) -> Tensor:
        ctx.call, ctx.tape, ctx.position = call, tape, position
        ctx.save_for_backward(*tensors)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        call: OwnerCall = ctx.call
        ctx.tape.check_batch_first(call.module, grad)
        call.tensors = tuple(tensor.detach() for tensor in ctx.saved_tensors)
        call.output_grads[ctx.position] = grad
        ctx.tape.record_call(call)
        return grad, None, None, None, None, *[None] * len(call.tensors)


def own_gradients(call: OwnerCall, examples: int) -> dict[nn.Parameter, Dense]:
    """Per-example gradients of the owner's own parameters, each (b, *shape).

    Raises: UnsupportedModelError when an input has neither one row per example nor one for all, or when the module
    cannot be mapped over examples.
    """
    for tensor in call.tensors:
        if tensor.dim() and tensor.shape[0] not in (1, examples):
            raise UnsupportedModelError(
                f"{type(call.module).__name__} has no clipping rule, and its input of shape {tuple(tensor.shape)} has "
                f"not one row per example ({examples}), so its parameters {sorted(call.parameters)} cannot be "
                "differentiated example by example. Freeze them (requires_grad_(False))."
            )
    gradients = _mapped(call, examples)
    return {
        parameter: Dense(gradients[name].to(accumulation_dtype(gradients[name].dtype)))
        for name, parameter in call.parameters.items()
    }


def _mapped(call: OwnerCall, examples: int) -> dict[str, Tensor]:
    """vmap over examples of the vector-Jacobian product: one example's NaN stays its own."""
    leaves = call.leaves()
    split = [isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == examples for leaf in leaves]
    positions = sorted(call.output_grads)
    grads = [call.output_grads[position] for position in positions]

    def one_example(rows: list[Any], output_rows: list[Tensor]) -> dict[str, Tensor]:
        inputs = [row[None] if is_split else row for row, is_split in zip(rows, split, strict=True)]

        def outputs(parameters: dict[str, Tensor]) -> list[Tensor]:
            produced = call.run(parameters, inputs)
            return [produced[position] for position in positions]

        parameters = {name: parameter.detach() for name, parameter in call.parameters.items()}
        pullback: Any = torch.func.vjp(outputs, parameters)[1]
        return pullback([row[None] for row in output_rows])[0]

    # vmap takes tensors only where it maps; everything else is bound around it.
    mapped_leaves = [leaf for leaf, is_split in zip(leaves, split, strict=True) if is_split]

    def with_shared(rows: list[Tensor], output_rows: list[Tensor]) -> dict[str, Tensor]:
        given = iter(rows)
        return one_example(
            [next(given) if is_split else leaf for leaf, is_split in zip(leaves, split, strict=True)], output_rows
        )

    try:
        return torch.func.vmap(with_shared)(mapped_leaves, grads)
    except (RuntimeError, ValueError) as problem:
        raise UnsupportedModelError(
            f"{type(call.module).__name__} has no clipping rule and cannot be differentiated example by example "
            f"({problem}). Freeze its parameters {sorted(call.parameters)} (requires_grad_(False))."
        ) from problem


@contextmanager
def _detached(module: nn.Module, own: Mapping[str, nn.Parameter]) -> Iterator[None]:
    for name, parameter in own.items():
        module._parameters[name] = parameter.detach()  # type: ignore[assignment]
    try:
        yield
    finally:
        for name, parameter in own.items():
            module._parameters[name] = parameter


def _random_state(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
