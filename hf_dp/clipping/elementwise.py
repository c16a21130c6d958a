"""Gradients of parameters that only multiply activations or are added to them, in modules that
compute much else: IA3, and the blocks of BEiT and ConvNeXt with their LayerScale.

:mod:`hf_dp.clipping.fallback` would compute all of such a module again for each example. Here it
runs with values that notice what is done to them. Where a value v meets activations x
(b, ..., *v.shape) as ``x * v`` or ``x + v``, its gradient for an example is the sum over positions
of ``g x``, or of g, with g the output gradient of that operation. After any other use the module is
left to the fallback.

Only the classes in ``ELEMENTWISE`` are served. Their forwards keep the order of the examples from
their input to that operation; another class might sort or transpose before it. FSDP2 gives modules
other classes, so it is not served.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from peft.tuners.ia3 import layer as ia3
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.models.beit.modeling_beit import BeitLayer
from transformers.models.convnext.modeling_convnext import ConvNextLayer
from transformers.models.convnextv2.modeling_convnextv2 import ConvNextV2GRN
from transformers.models.data2vec.modeling_data2vec_vision import Data2VecVisionLayer

from hf_dp.clipping.gradients import Dense, positions, sum_of
from hf_dp.clipping.rounding import accumulation_dtype
from hf_dp.clipping.tape import Tape, seen_in_backward

ELEMENTWISE: set[type[nn.Module]] = {
    ia3.Linear,
    BeitLayer,
    ConvNextLayer,
    ConvNextV2GRN,
    Data2VecVisionLayer,
}
_PRODUCTS = (torch.mul, Tensor.mul)
_SUMS = (torch.add, Tensor.add)


class _Value(Tensor):
    """A parameter, perhaps flattened, times ``factor``."""

    seen_by: Elementwise
    of: str  # the parameter's name
    factor: float

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        values = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, _Value)]
        with torch._C.DisableTorchFunctionSubclass():
            return values[0].seen_by.call(func, args, kwargs or {})


class Elementwise:
    """Watches one forward of ``module``.

    Attributes:
        values: its own parameters, to run it with.
        alone: whether nothing else was done with each of them.
        uses: the names of parameters, once for each use.
    """

    def __init__(self, tape: Tape, module: nn.Module, own: Mapping[str, nn.Parameter]) -> None:
        self.tape, self.module, self.own, self.alone = tape, module, own, True
        self.uses: list[str] = []
        self.values = {name: self._value(p.detach(), name, 1.0) for name, p in own.items()}

    def _value(self, tensor: Tensor, of: str, factor: float) -> Tensor:
        value = tensor.as_subclass(_Value)
        value.seen_by, value.of, value.factor = self, of, factor
        return value

    def end(self, output: Any) -> Any:
        """Return what the forward returned, which is over, without values."""
        found = any(isinstance(each, _Value) for each in pytree.tree_leaves(output))
        self.alone = self.alone and not found and set(self.uses) == set(self.own)
        return pytree.tree_map_only(_Value, _constant, output)

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return what a function makes of arguments with a value among them."""
        differentiated = torch.is_grad_enabled() and not kwargs
        if differentiated and len(args) == 1 and function is Tensor.flatten:
            return self._value(function(*args), args[0].of, args[0].factor)
        if differentiated and len(args) == 2 and function in (*_PRODUCTS, *_SUMS):
            value, x = args if isinstance(args[0], _Value) else args[::-1]
            is_product = function in _PRODUCTS
            if isinstance(x, (int, float)) and is_product:
                return self._value(function(*args), value.of, value.factor * x)
            if _fits(value, x):
                output = function(x, _constant(value))
                return self._capture(output, value, x if is_product else None)
        plain: Any = pytree.tree_map_only(_Value, _constant, (args, dict(kwargs)))
        found = function(*plain[0], **plain[1])
        # An attribute such as a type or a shape is no use; a transpose is one.
        is_attribute = getattr(function, "__name__", None) == "__get__"
        self.alone &= is_attribute and not isinstance(found, Tensor)
        return found

    def _capture(self, output: Tensor, value: _Value, x: Tensor | None) -> Tensor:
        self.uses.append(value.of)
        see = partial(self._see, value.of, value.factor, len(_without_ones(value)))
        # The output has memory of its own, which autograd does not read.
        return seen_in_backward(output, self.own[value.of], lambda fresh: fresh.data, see, x)

    def _see(
        self, name: str, factor: float, dims: int, saved: Sequence[Tensor | None], grad: Tensor
    ) -> None:
        if not self.alone:
            return
        dtype, (x,) = accumulation_dtype(grad.dtype), saved
        terms = self.tape.by_example(self.module, grad).to(dtype) * factor
        if x is not None:
            terms *= self.tape.by_example(self.module, x)
        total = sum_of(positions(terms, dims), dtype)
        gradients = total.gradients.view(-1, *self.own[name].shape)
        self.tape.capture(self.module, name, Dense(gradients, True, total.of_terms))


def _constant(value: Tensor) -> Tensor:
    return value.as_subclass(Tensor)


def _without_ones(value: Tensor) -> torch.Size:
    """Return the shape without ones in front."""
    shape = value.shape
    while shape and shape[0] == 1:
        shape = shape[1:]
    return shape


def _fits(value: Tensor, x: Any) -> bool:
    """Return whether x has something in front of the value's shape. What depends on no weight that
    trains may be one tensor for all examples."""
    if not isinstance(x, Tensor) or isinstance(x, _Value) or not x.requires_grad:
        return False
    shape = _without_ones(value)
    behind = len(shape) < x.dim() >= value.dim() and x.shape[x.dim() - len(shape) :] == shape
    return behind and x.is_floating_point() and value.is_floating_point()
