"""Per-example gradients of a module that owns trainable parameters but has no rule.

The ``per_example`` strategy treats every module in this way. The module runs as it is, with its
*own* parameters detached (its children keep their rules), and its inputs are kept. Once backward
has delivered its output gradients, it is run again for each example and differentiated with respect
to its own parameters only, by ``torch.func``. Its output for an example alone is compared with its
output in the batch: a module that mixes examples, or a tensor that only appears to have the
examples in its first dimension, is refused rather than guessed at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from hf_dp.clipping.dropout import DrawnMasks, GivenMasks
from hf_dp.clipping.sharding import passed_on
from hf_dp.clipping.tape import Tape
from hf_dp.errors import UnsupportedModelError

_TENSOR = object()


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters that ``module`` owns, by dotted name.

    These are its own and those of its parameter containers.
    """
    own = {}
    if module._parameters:  # most modules have none, and each is asked at every step
        own = {name: p for name, p in module.named_parameters(recurse=False) if p.requires_grad}
    for name, child in module.named_children():
        if isinstance(child, (nn.ParameterDict, nn.ParameterList)):
            own |= {f"{name}.{key}": p for key, p in own_parameters(child).items()}
    return own


@dataclass(eq=False)
class FallbackCall:
    """One forward of a module without a rule, differentiated by example after backward.

    Attributes:
        function: what is run again: the module's forward, or another of its methods.
        parameters: the module's own, by their names in ``function``.
        constants: other parameters that it reads, where they are not in the module any more.
        arguments: the leaves of (args, kwargs); each tensor is replaced by _TENSOR and comes back
            from the autograd graph.
        autocast: device, whether it was on, dtype.
        expanded: whether something that all examples share was expanded to the batch.
        tensors: the tensors among the arguments, followed by the dropout masks.
        outputs: the output leaves that received gradients, by position.
    """

    module: nn.Module
    function: _Method
    parameters: dict[str, Tensor]
    spec: pytree.TreeSpec
    arguments: list[Any]
    autocast: tuple[str, bool, torch.dtype]
    tensors: tuple[Tensor, ...] = ()
    expanded: bool = False
    constants: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    output_grads: dict[int, Tensor] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Return the parameters' names in the module, sorted."""
        return sorted(name.removeprefix("module.") for name in self.parameters)

    def run(
        self, parameters: Mapping[str, Tensor], leaves: Sequence[Any], masks: Sequence[Tensor]
    ) -> list[Any]:
        """Return the output leaves for these parameters, argument leaves and dropout masks."""
        args, kwargs = pytree.tree_unflatten(list(leaves), self.spec)
        device, enabled, dtype = self.autocast
        with (
            torch.autocast(device, enabled=enabled, dtype=dtype),
            GivenMasks(masks) if masks else nullcontext(),
        ):
            # Tied parameters stay apart: a child that shares one captures its own use of it.
            values = {**self.constants, **parameters}
            output = torch.func.functional_call(
                self.function, values, args, kwargs, tie_weights=False
            )
        return pytree.tree_leaves(output)

    def keep_values(self, tape: Tape) -> None:
        """Copy the parameters that a sharded module has while its backward runs, and only then."""
        if self.outputs:
            return  # copied with the first output
        every = dict(self.function.named_parameters(remove_duplicate=False))
        if self.function.of_parameters:
            every = {name: every[name] for name in self.parameters}
        gone = [name for name, parameter in every.items() if isinstance(parameter, DTensor)]
        if gone:
            raise UnsupportedModelError(
                f"{tape.describe(self.module)} has no clipping rule, and FSDP2 freed its parameter "
                f"{gone[0].removeprefix('module.')!r} before its gradient was known. Freeze its "
                f"parameters {self.names()} (requires_grad_(False)), or set "
                "reshard_after_backward to False."
            )
        values = {name: parameter.detach().clone() for name, parameter in every.items()}
        self.parameters = {name: values.pop(name) for name in self.parameters}
        self.constants = values


class _Method(nn.Module):
    """A module's method as a module, to which ``torch.func.functional_call`` can give parameters.

    Calling the module itself would apply its forward hooks a second time.
    """

    def __init__(self, module: nn.Module, method: Callable[..., Any], of_parameters: bool = False):
        super().__init__()
        self.module = module
        self.method = method
        self.of_parameters = of_parameters  # known to read nothing else

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.method(self.module, *args, **kwargs)


def fallback_forward(
    tape: Tape, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """Run the forward of a module without a rule; its own parameters' gradients follow later."""
    if not torch.is_grad_enabled():
        return original(module, *args, **kwargs)
    own = own_parameters(module)
    if not own:  # a module around it has a container of parameters in common with it (Uni-LoRA)
        return original(module, *args, **kwargs)
    tape.note_forward(module, *own)
    with _detached(module, own), DrawnMasks(next(iter(own.values())).device) as masks:
        output = original(module, *args, **kwargs)
    if masks.other_draws:
        # To repeat other draws, the whole batch would have to run at once, where 0 * NaN would
        # carry one example's NaN to all others.
        raise UnsupportedModelError(
            f"{tape.describe(module)} has no clipping rule and draws random numbers other than by "
            "dropout, so it cannot be run again example by example. Freeze its parameters "
            f"{sorted(own)} (requires_grad_(False)), or switch the random part off (attention "
            "dropout: attn_implementation='eager'; skipped layers: drop_path_rate=0)."
        )
    function = _Method(module, original)
    return _captured(tape, module, function, own, (args, kwargs), masks.drawn, output)


def shared_method(
    tape: Tape,
    method: Callable[..., Any],
    names: Sequence[str],
    module: nn.Module,
    *args: Any,
    **kw: Any,
) -> Any:
    """Run a method that computes, from parameters alone, something that all examples share.

    Examples are T5's relative position bias and the prompt of prompt tuning. The result, with a
    first dimension of 1, is expanded to the batch, so that each example gets its own gradient with
    respect to it.
    """
    with tape.originals():
        if not torch.is_grad_enabled():
            return method(module, *args, **kw)
        parameters = {name: module.get_parameter(name) for name in names}
        tape.note_forward(module, *names)
        with (
            _detached(module, parameters),
            DrawnMasks(next(iter(parameters.values())).device) as masks,
        ):
            output = method(module, *args, **kw)
    if masks.other_draws or masks.drawn:
        raise UnsupportedModelError(
            f"{tape.describe(module)} draws random numbers for what all examples share. Set its "
            f"dropout to 0, or freeze {sorted(parameters)} (requires_grad_(False))."
        )
    function = _Method(module, method, of_parameters=True)
    return _captured(tape, module, function, parameters, (args, kw), [], output)


def _captured(
    tape: Tape,
    module: nn.Module,
    function: _Method,
    own: Mapping[str, nn.Parameter],
    arguments: Any,
    masks: Sequence[Tensor],
    output: Any,
) -> Any:
    """Return the output, wrapped so that backward notes its gradients.

    What is computed from parameters and indices alone, with a first dimension of 1, is shared by
    all examples and is expanded to the batch, so that each gets its own gradient.
    """
    leaves, spec = pytree.tree_flatten(arguments)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for tensor in tensors:
        tape.refuse_parameter(module, tensor)
    outputs, output_spec = pytree.tree_flatten(output)
    _refuse_outputs(tape, module, own, outputs)
    anchor = next(iter(own.values()))
    device = anchor.device.type
    shared = function.of_parameters or not any(leaf.is_floating_point() for leaf in tensors)
    call = FallbackCall(
        module,
        function,
        {f"module.{name}": parameter for name, parameter in own.items()},
        spec,
        [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves],
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),
    )

    def capture(position: int, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        # The shape is (1, T, d) or (1, heads, T, T); a scalar or a vector is more likely meant to
        # broadcast as it is.
        if shared and tape.examples is not None and leaf.dim() >= 3 and leaf.shape[0] == 1:
            call.expanded = True
            leaf = leaf.expand(tape.examples, *leaf.shape[1:])
        return _Capture.apply(leaf, anchor, call, tape, position, *tensors, *masks)

    return pytree.tree_unflatten([capture(*each) for each in enumerate(outputs)], output_spec)


def _refuse_outputs(
    tape: Tape, module: nn.Module, own: Mapping[str, nn.Parameter], outputs: Sequence[Any]
) -> None:
    """Raise for complex numbers and for outputs that may hide tensors."""
    if any(leaf.is_complex() for leaf in (*outputs, *own.values()) if isinstance(leaf, Tensor)):
        raise UnsupportedModelError(
            f"{tape.describe(module)} has no clipping rule and works with complex numbers. Freeze "
            f"its parameters {sorted(own)} (requires_grad_(False))."
        )
    for leaf in outputs:
        if not isinstance(leaf, (Tensor, bool, int, float, str, type(None))):
            raise UnsupportedModelError(
                f"{tape.describe(module)} has no clipping rule and returns a "
                f"{type(leaf).__name__}, which the engine cannot inspect, so the gradients of its "
                f"parameters {sorted(own)} are not known. Freeze them (requires_grad_(False))."
            )


class _Capture(torch.autograd.Function):
    """Identity that notes its output gradient.

    ``anchor``, a parameter of the module, is an input so that backward reaches this in any case.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        anchor: Tensor,
        call: FallbackCall,
        tape: Tape,
        position: int,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.call, ctx.tape, ctx.position = call, tape, position
        ctx.save_for_backward(output, *tensors)
        return passed_on(output, call.module)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        call: FallbackCall = ctx.call
        output, *tensors = (tensor.detach() for tensor in ctx.saved_tensors)
        ctx.tape.by_example(call.module, grad)
        if ctx.tape.sharded:
            call.keep_values(ctx.tape)
        call.tensors = tuple(tensors)
        call.outputs[ctx.position] = output
        call.output_grads[ctx.position] = grad
        ctx.tape.capture_call(call)
        return grad, None, None, None, None, *[None] * len(tensors)


def fallback_gradients(call: FallbackCall, tape: Tape) -> None:
    """Capture the per-example gradients of the module's own parameters; free what the call kept.

    Raises:
        UnsupportedModelError: the module mixes examples, or an input's first dimension is neither
            the number of examples nor 1.
    """
    examples = tape.expected_examples()
    positions = sorted(call.output_grads)
    grads = [_singles(call.output_grads[position], call, tape) for position in positions]
    tensors = iter(call.tensors)
    leaves = [next(tensors) if leaf is _TENSOR else leaf for leaf in call.arguments]
    masks = list(tensors)
    flattened = any(call.output_grads[position].shape[0] != examples for position in positions)
    mapped = [_has_examples(each, tape, flattened, call.expanded) for each in (*leaves, *masks)]
    inputs = [
        _singles(each, call, tape) if is_mapped else each
        for each, is_mapped in zip((*leaves, *masks), mapped, strict=True)
    ]

    def run(own: dict[str, Tensor], single: list[Tensor]) -> list[Tensor]:
        given = iter(single)
        here = [
            next(given) if is_mapped else each
            for each, is_mapped in zip(inputs, mapped, strict=True)
        ]
        produced = call.run(own, here[: len(leaves)], here[len(leaves) :])
        return [produced[position] for position in positions]

    per_example = [each for each, is_mapped in zip(inputs, mapped, strict=True) if is_mapped]
    gradients, outputs = _for_each_example(run, per_example, grads, call, tape)
    for position, alone in zip(positions, outputs, strict=True):
        _compare(alone, _singles(call.outputs[position], call, tape), call, tape)
    call.tensors, call.outputs, call.output_grads, call.constants = (), {}, {}, {}
    for name in call.parameters:
        tape.capture(call.module, name.removeprefix("module."), gradients[name])


def _has_examples(leaf: Any, tape: Tape, flattened: bool, expanded: bool) -> bool:
    """Return whether an input has an example dimension, judged by its shape.

    The comparison of outputs finds wrong judgments. An input (b * T, d) is believed to have one
    only beside an output like it, and (b,) only beside an output with an example dimension:
    positions (T,) look the same when T is the number of examples.
    """
    if not isinstance(leaf, Tensor) or leaf.dim() == 0 or (expanded and leaf.dim() == 1):
        return False
    return leaf.shape[0] == tape.expected_examples() or (
        flattened and leaf.dim() == 2 and tape.is_flattened(leaf.shape[0])
    )


def _singles(tensor: Tensor, call: FallbackCall, tape: Tape) -> Tensor:
    """Return b batches of one example: (b, ...) as (b, 1, ...), (b * T, d) as (b, T, d)."""
    split = tape.by_example(call.module, tensor)
    return split[:, None] if split.shape == tensor.shape else split


def _for_each_example(
    run: Callable[..., list[Tensor]],
    inputs: list[Tensor],
    grads: list[Tensor],
    call: FallbackCall,
    tape: Tape,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return parameter gradients and outputs of each example, stacked.

    ``vmap`` computes them (one example's NaN stays its own). A module that cannot be mapped (a
    branch on values, an operation without a batching rule, a hook that calls requires_grad_) is run
    by plain autograd once for each example.
    """
    parameters = {name: parameter.detach() for name, parameter in call.parameters.items()}

    def mapped(
        single: list[Tensor], output_grads: list[Tensor]
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        outputs, pullback, *_ = torch.func.vjp(lambda own: run(own, single), parameters)
        return pullback(output_grads)[0], outputs

    def alone(index: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        own = {name: parameter.clone().requires_grad_() for name, parameter in parameters.items()}
        with torch.enable_grad():
            outputs = run(own, [each[index] for each in inputs])
        used = [(o, g[index]) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
        found = torch.autograd.grad(
            [o for o, _ in used], list(own.values()), [g for _, g in used], allow_unused=True
        )
        gradients = {
            n: torch.zeros_like(p) if g is None else g
            for (n, p), g in zip(own.items(), found, strict=True)
        }
        return gradients, [output.detach() for output in outputs]

    try:
        return torch.func.vmap(mapped)(inputs, grads)
    except (RuntimeError, ValueError):
        pass
    try:
        each = [alone(index) for index in range(len(grads[0]))]
    except (RuntimeError, ValueError, IndexError) as problem:
        raise UnsupportedModelError(
            f"{tape.describe(call.module)} has no clipping rule and cannot be differentiated "
            f"example by example ({problem}). Freeze its parameters {call.names()} "
            "(requires_grad_(False))."
        ) from problem
    return pytree.tree_map(lambda *results: torch.stack(results), *each)


def _compare(alone: Tensor, together: Tensor, call: FallbackCall, tape: Tape) -> None:
    """Raise unless each example's output alone equals its output in the batch, up to rounding."""
    if alone.shape == together.shape:
        dims = tuple(range(1, together.dim()))
        # An example that is not finite is removed anyway.
        usable = torch.isfinite(together).all(dim=dims, keepdim=True)
        # NaN where only the output alone is not finite; the comparison below then fails.
        gap = torch.where(usable, alone.double() - together.double(), 0.0).abs()
        size = torch.where(usable, together.double(), 0.0).abs()
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-3}.get(together.dtype, 5e-2)
        if call.autocast[1]:
            tolerance = 5e-2
        if bool((gap.amax(dims) <= tolerance * size.amax(dims).clamp_min(1e-6)).all()):
            return
    raise UnsupportedModelError(
        f"{tape.describe(call.module)} has no clipping rule and produces a different output for an "
        "example alone than in a batch: it mixes examples, or its inputs do not have the examples "
        f"in their first dimension. Freeze its parameters {call.names()} (requires_grad_(False))."
    )


@contextmanager
def _detached(module: nn.Module, own: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Let a module run on detached copies of its parameters inside."""
    places = []
    for name, parameter in own.items():
        path, _, key = name.rpartition(".")
        places.append((module.get_submodule(path)._parameters, key, parameter))
    for parameters, key, parameter in places:
        parameters[key] = parameter.detach()  # type: ignore[assignment]
    try:
        yield
    finally:
        for parameters, key, parameter in places:
            parameters[key] = parameter
