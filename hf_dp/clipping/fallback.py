"""Per-example gradients of a module that owns trainable parameters but has no rule.

The ``per_example`` strategy treats every module in this way. The module runs as it is, with its
*own* parameters detached (its children keep their rules), and its inputs are kept. Once backward
has delivered its output gradients, it is run again for each example and differentiated with respect
to its own parameters only, by ``torch.func``. Its output for an example alone is compared with its
output in the batch: a module that mixes examples, or a tensor that only appears to have the
examples in its first dimension, is refused rather than guessed at. A few classes need not run again
(:mod:`hf_dp.clipping.elementwise`).

**What all examples share.** Some methods compute something from parameters alone. Their results
have no example dimension, so the gradient that arrives at a parameter is already a sum over
examples. A result with a first dimension of 1 is therefore expanded to the batch first, so that
each example gets its own gradient with respect to it. These methods are known by class and name:

* relative position biases: T5 and its family (``compute_bias``), MPNet (``compute_position_bias``);
* the prompt of PEFT's prompt tuning and p-tuning (``get_prompt``), computed once and repeated.

Any other method like these is refused because of the shape of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from peft import PeftModel, PeftType
from peft.tuners.ln_tuning.layer import LNTuningLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.utils import _pytree as pytree
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from hf_dp.clipping.draws import DrawnMasks, GivenMasks
from hf_dp.clipping.elementwise import ELEMENTWISE, Elementwise
from hf_dp.clipping.tape import Tape, has_own_forward, seen_in_backward
from hf_dp.errors import UnsupportedModelError

Method = Callable[..., object]  # of a module, which is its first argument
_TENSOR = object()


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters that ``module`` owns, by dotted name. These are its own and
    those of its parameter containers; or all within a module that reads those of its parts."""
    if _is_whole(module):
        return {name: p for name, p in module.named_parameters() if p.requires_grad}
    own = {}
    if module._parameters:  # most modules have none, and each is asked at every step
        own = {name: p for name, p in module.named_parameters(recurse=False) if p.requires_grad}
    for name, child in module.named_children():
        if isinstance(child, (nn.ParameterDict, nn.ParameterList)):
            own |= {f"{name}.{key}": p for key, p in own_parameters(child).items()}
    return own


def _is_whole(module: nn.Module) -> bool:
    """Return whether a module reads its parts' weights itself: torch's attention, PEFT's LoRA of a
    parameter, and layers with a short convolution (Mamba, LFM2), unless LFM2's is frozen."""
    if isinstance(module, (nn.MultiheadAttention, ParamWrapper)):
        return True
    if type(module).__name__ in _SHORT_CONVOLUTIONS:
        return module.get_parameter("conv.weight").requires_grad
    return isinstance(module._modules.get("conv1d"), nn.Conv1d)


_SHORT_CONVOLUTIONS = ("Lfm2ShortConv", "Lfm2MoeShortConv")
_BIAS_METHODS = {"compute_bias", "compute_position_bias"}
_BIAS_TABLE = "relative_attention_bias"
_EXPANDED_BY_PEFT = {PeftType.PROMPT_TUNING, PeftType.P_TUNING}


@dataclass(frozen=True)
class SharedMethod:
    """A method of ``module``, how to call it for one example, and the parameters it reads."""

    name: str
    call: Method
    parameters: dict[str, nn.Parameter]


def find_shared_method(module: nn.Module) -> SharedMethod | None:
    """Return this module's shared method, if it has one that reads a trainable parameter."""
    found = _prompt(module) if isinstance(module, PeftModel) else _position_bias(module)
    return found if found is not None and found.parameters else None


def _position_bias(module: nn.Module) -> SharedMethod | None:
    table = module._modules.get(_BIAS_TABLE)
    if not isinstance(table, (nn.Embedding, LNTuningLayer)):
        return None
    names = [name for name in _BIAS_METHODS if callable(getattr(type(module), name, None))]
    if len(names) != 1:
        return None
    call = method = getattr(type(module), names[0])
    if isinstance(module, MPNetEncoder):
        # Its method expands to the batch itself, so it is given one example.
        def call(owner: nn.Module, x: Tensor, *args: object, **kwargs: object) -> object:
            return method(owner, x[:1], *args, **kwargs)

    return SharedMethod(names[0], call, _trainable(table, _BIAS_TABLE))


def _prompt(module: PeftModel) -> SharedMethod | None:
    encoders, adapter = module._modules.get("prompt_encoder"), module.active_adapter
    config = module.peft_config.get(adapter) if isinstance(adapter, str) else None
    if encoders is None or config is None or config.peft_type not in _EXPANDED_BY_PEFT:
        return None

    def call(owner: PeftModel, batch_size: int, *args: object, **kwargs: object) -> object:
        get_prompt: Method = type(owner).get_prompt
        return get_prompt(owner, 1, *args, **kwargs)

    return SharedMethod("get_prompt", call, _trainable(encoders, "prompt_encoder"))


def _trainable(module: nn.Module, prefix: str) -> dict[str, nn.Parameter]:
    return {f"{prefix}.{name}": p for name, p in module.named_parameters() if p.requires_grad}


class _Method(nn.Module):
    """A module's method as a module, to which ``torch.func.functional_call`` can give parameters.
    Calling the module itself would apply its forward hooks a second time."""

    def __init__(self, module: nn.Module, method: Method):
        super().__init__()
        self.module, self.method = module, method

    def forward(self, *args: object, **kwargs: object) -> object:
        with _kept_for_backward(self.module):
            return self.method(self.module, *args, **kwargs)


@contextmanager
def _kept_for_backward(module: nn.Module) -> Iterator[None]:
    """Let a layer under gradient checkpointing keep what its backward needs. A second run in
    backward would read the module's own parameters, not those that it is given here."""
    if not isinstance(module, GradientCheckpointingLayer):
        yield
        return
    before, module.gradient_checkpointing = module.gradient_checkpointing, False
    try:
        yield
    finally:
        module.gradient_checkpointing = before


@dataclass(eq=False)
class FallbackCall:
    """One forward of a module without a rule, differentiated by example after backward."""

    tape: Tape
    module: nn.Module
    function: _Method  # what is run again
    parameters: dict[str, Tensor]  # the module's own, by their names in ``function``
    of_parameters: bool  # whether it is known to read nothing else
    spec: pytree.TreeSpec
    # The leaves of (args, kwargs), with _TENSOR for each tensor, which comes back from the graph.
    arguments: list[object]
    autocast: tuple[str, bool, torch.dtype]  # device, whether it was on, dtype
    tensors: tuple[Tensor, ...] = ()  # those among the arguments, followed by the dropout masks
    expanded: bool = False  # whether something that all examples share was expanded to the batch
    # Other parameters that it reads, where they are not in the module any more.
    constants: dict[str, Tensor] = field(default_factory=dict)
    # The output leaves that received gradients, by position, with these gradients.
    met: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def run(
        self, parameters: Mapping[str, Tensor], leaves: Sequence[object], masks: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the output leaves for these parameters, argument leaves and dropout masks."""
        args, kwargs = pytree.tree_unflatten(list(leaves), self.spec)
        device, enabled, dtype = self.autocast
        with (
            torch.autocast(device, enabled=enabled, dtype=dtype),
            GivenMasks(masks) if masks else nullcontext(),
        ):
            # Tied parameters stay apart: a child that shares one captures its own use of it.
            values = {**self.constants, **parameters}
            output = functional_call(self.function, values, args, kwargs, tie_weights=False)
        return pytree.tree_leaves(output)

    def see(self, position: int, saved: Sequence[Tensor], grad: Tensor) -> None:
        """Note the gradient of an output leaf, and the tensors that were kept."""
        output, *tensors = (tensor.detach() for tensor in saved)
        self.tape.by_example(self.module, grad)
        if self not in self.tape.after:  # the first gradient of this pass
            self.met, self.tape.after[self] = {}, self.differentiate
            if self.tape.sharded:
                self.keep_values()
        self.tensors, self.met[position] = tuple(tensors), (output, grad)

    def differentiate(self) -> None:
        """Capture the gradients of the module's own parameters; free what the call kept."""
        tape, positions = self.tape, sorted(self.met)
        examples = tape.expected_examples()

        def singles(tensor: Tensor) -> Tensor:
            """Return b batches of one example: (b, ...) as (b, 1, ...), (b * T, d) as (b, T, d)."""
            split = tape.by_example(self.module, tensor)
            return split[:, None] if split.shape == tensor.shape else split

        grads = [singles(self.met[position][1]) for position in positions]
        tensors = iter(self.tensors)
        leaves: list[Any] = [next(tensors) if x is _TENSOR else x for x in self.arguments]
        count = len(leaves)
        leaves += tensors  # the masks
        flattened = any(grad.shape[0] != examples for _, grad in self.met.values())
        # Those with an example dimension lie in a dictionary, by their place among all leaves.
        mapped = {
            place: singles(leaf)
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and _has_examples(leaf, tape, flattened, self.expanded)
        }

        def run(own: dict[str, Tensor], single: dict[int, Tensor]) -> list[Tensor]:
            here = [single.get(place, leaf) for place, leaf in enumerate(leaves)]
            produced = self.run(own, here[:count], here[count:])
            return [produced[position] for position in positions]

        gradients, outputs = _for_each_example(run, mapped, grads, self)
        for position, alone in zip(positions, outputs, strict=True):
            _compare(alone, singles(self.met[position][0]), self)
        self.tensors, self.met, self.constants = (), {}, {}
        for name in self.parameters:
            tape.capture(self.module, name.removeprefix("module."), gradients[name])

    def keep_values(self) -> None:
        """Copy the parameters that a sharded module has while its backward runs, and only then."""
        every = dict(self.function.named_parameters(remove_duplicate=False))
        if self.of_parameters:
            every = {name: every[name] for name in self.parameters}
        gone = [name for name, parameter in every.items() if isinstance(parameter, DTensor)]
        if gone:
            raise self.refusal(
                f"and FSDP2 freed its parameter {gone[0].removeprefix('module.')!r} before its "
                "gradient was known",
                "set reshard_after_backward to False",
            )
        values = {name: parameter.detach().clone() for name, parameter in every.items()}
        self.parameters = {name: values.pop(name) for name in self.parameters}
        self.constants = values

    def refusal(self, why: str, instead: str = "") -> UnsupportedModelError:
        names = sorted(name.removeprefix("module.") for name in self.parameters)
        return UnsupportedModelError(
            f"{self.tape.describe(self.module)} has no clipping rule, {why}. Freeze its parameters "
            f"{names} (requires_grad_(False)){f', or {instead}' if instead else ''}."
        )


def fallback_forward(
    tape: Tape,
    method: Method,
    shared: Sequence[str],
    module: nn.Module,
    *args: object,
    **kwargs: object,
) -> object:
    """Run a module without a rule; its own parameters' gradients follow after backward. ``method``
    is its own forward, or its shared method, which reads the parameters ``shared``."""
    with tape.originals() if shared else nullcontext():
        own = {name: module.get_parameter(name) for name in shared} or own_parameters(module)
        # A module around it may have a container of parameters in common with it (Uni-LoRA).
        if not own or not torch.is_grad_enabled():
            return method(module, *args, **kwargs)
        if isinstance(module, nn.MultiheadAttention) and kwargs.get("attn_mask") is not None:
            method = partial(method, attn_mask=kwargs.pop("attn_mask"))  # (T, T), of no example
        anchor = next(iter(own.values()))
        function = _Method(module, method)
        parameters: dict[str, Tensor] = {f"module.{name}": each for name, each in own.items()}
        served = type(module) in ELEMENTWISE and not has_own_forward(module) and not shared
        watched = Elementwise(tape, module, own) if served else None
        values = watched.values if watched else {name: p.detach() for name, p in own.items()}
        given = {f"module.{name}": each for name, each in values.items()}
        with DrawnMasks(anchor.device) as masks:
            output = functional_call(function, given, args, kwargs, tie_weights=False)
    if watched is not None:
        output = watched.end(output)
        if watched.alone:
            tape.note_forward(module, *watched.uses)
            return output
    tape.note_forward(module, *own)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    device = anchor.device.type
    call = FallbackCall(
        tape,
        module,
        function,
        parameters,
        bool(shared),
        spec,
        [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves],
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),
    )
    if masks.other_draws:
        # To repeat other draws, the whole batch would have to run at once, where 0 * NaN would
        # carry one example's NaN to all others.
        raise call.refusal(
            "and draws random numbers other than by dropout, so it cannot be run again example by "
            "example",
            "switch the random part off (attention dropout: attn_implementation='eager', or "
            "self_attn.dropout = 0.0 of torch's layers; skipped layers: drop_path_rate=0)",
        )
    if shared and masks.drawn:
        why = "and draws random numbers for what all examples share"
        raise call.refusal(why, "set its dropout to 0")
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for tensor in tensors:
        tape.refuse_parameter(module, tensor)
    return _captured(call, output, anchor, tensors, masks.drawn)


def _captured(
    call: FallbackCall,
    output: object,
    anchor: Tensor,
    tensors: Sequence[Tensor],
    masks: Sequence[Tensor],
) -> object:
    """Return the output, wrapped so that backward notes its gradients. What is computed from
    parameters and indices alone, with a first dimension of 1, is shared by all examples and is
    expanded to the batch."""
    outputs, output_spec = pytree.tree_flatten(output)
    for leaf in (*outputs, *call.parameters.values()):
        if isinstance(leaf, Tensor) and leaf.is_complex():
            raise call.refusal("and works with complex numbers")
        if not isinstance(leaf, (Tensor, bool, int, float, str, type(None))):  # may hide tensors
            kind = type(leaf).__name__
            raise call.refusal(f"and returns a {kind}, which the engine cannot inspect")
    shared = call.of_parameters or not any(leaf.is_floating_point() for leaf in tensors)
    examples = call.tape.examples

    def capture(position: int, leaf: object) -> object:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        # The shape is (1, T, d) or (1, heads, T, T); a scalar or a vector is more likely meant to
        # broadcast as it is.
        if shared and examples is not None and leaf.dim() >= 3 and leaf.shape[0] == 1:
            call.expanded = True
            leaf = leaf.expand(examples, *leaf.shape[1:])
        see = partial(call.see, position)
        # A copy, so that a model may change it in place (Falcon does) and the leaf remains.
        return seen_in_backward(leaf, anchor, torch.clone, see, leaf, *tensors, *masks)

    return pytree.tree_unflatten([capture(*each) for each in enumerate(outputs)], output_spec)


def _has_examples(leaf: Tensor, tape: Tape, flattened: bool, expanded: bool) -> bool:
    """Return whether an input has an example dimension, judged by its shape.

    The comparison of outputs finds wrong judgments. An input (b * T, d) is believed to have one
    only beside an output like it, and (b,) only beside an output with an example dimension:
    positions (T,) look the same when T is the number of examples.
    """
    if leaf.dim() == 0 or (expanded and leaf.dim() == 1):
        return False
    return leaf.shape[0] == tape.expected_examples() or (
        flattened and leaf.dim() == 2 and tape.is_flattened(leaf.shape[0])
    )


def _for_each_example(
    run: Callable[[dict[str, Tensor], dict[int, Tensor]], list[Tensor]],
    inputs: dict[int, Tensor],
    grads: list[Tensor],
    call: FallbackCall,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return parameter gradients and outputs of each example, stacked.

    ``vmap`` computes them (one example's NaN stays its own). A module that cannot be mapped (a
    branch on values, an operation without a batching rule, a hook that calls requires_grad_) is run
    by plain autograd once for each example.
    """
    parameters = {name: parameter.detach() for name, parameter in call.parameters.items()}

    def mapped(
        single: dict[int, Tensor], output_grads: list[Tensor]
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        outputs, pullback, *_ = torch.func.vjp(lambda own: run(own, single), parameters)
        return pullback(output_grads)[0], outputs

    def alone(index: int) -> tuple[dict[str, Tensor], list[Tensor]]:
        own = {name: parameter.clone().requires_grad_() for name, parameter in parameters.items()}
        with torch.enable_grad():
            outputs = run(own, {place: each[index] for place, each in inputs.items()})
        used = [(o, g[index]) for o, g in zip(outputs, grads, strict=True) if o.requires_grad]
        found = torch.autograd.grad(
            [o for o, _ in used],
            list(own.values()),
            [g for _, g in used],
            allow_unused=True,
            materialize_grads=True,
        )
        return dict(zip(own, found, strict=True)), [output.detach() for output in outputs]

    try:
        return torch.func.vmap(mapped)(inputs, grads)
    except (RuntimeError, ValueError):
        pass
    try:
        each = [alone(index) for index in range(len(grads[0]))]
    except (RuntimeError, ValueError, IndexError) as problem:
        why = f"and cannot be differentiated example by example ({problem})"
        raise call.refusal(why) from problem
    return pytree.tree_map(lambda *results: torch.stack(results), *each)


def _compare(alone: Tensor, together: Tensor, call: FallbackCall) -> None:
    """Raise unless each example's output alone equals its output in the batch, up to rounding."""
    if alone.shape == together.shape:
        dims = tuple(range(1, together.dim()))
        wide = torch.promote_types(together.dtype, torch.float32)
        size = together.abs().amax(dims).to(wide)  # with NaN in it, NaN
        gap = (alone.to(wide) - together.to(wide)).abs().amax(dims)
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-3}.get(together.dtype, 5e-2)
        if call.autocast[1]:
            tolerance = 5e-2
        # An example that is not finite is removed anyway; one that is so only alone fails here.
        if bool(((gap <= tolerance * size.clamp_min(1e-6)) | ~torch.isfinite(size)).all()):
            return
    raise call.refusal(
        "and produces a different output for an example alone than in a batch: it mixes examples, "
        "or its inputs do not have the examples in their first dimension"
    )
