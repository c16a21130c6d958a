"""Parameters that a module without a rule only multiplies activations by, or adds to them.

Learned scales (IA3; LayerScale, as in BEiT and ConvNeXt) stand in modules that compute much else,
and :mod:`hf_dp.clipping.fallback` would compute all of it again. Here the module runs with values
that notice what is done to them. Where a value v meets activations x (b, ..., *v.shape) as
``x * v`` or ``x + v``, its gradient for an example is the sum over positions of ``g x``, or of g,
with g the output gradient of that operation. After any other use the module is left to the
fallback, as it is at first: that compares examples alone with examples in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hf_dp.clipping.gradients import Dense, positions, sum_of
from hf_dp.clipping.rounding import accumulation_dtype
from hf_dp.clipping.tape import Tape, seen_in_backward
from hf_dp.errors import UnaccountedGradientError

_PRODUCTS = (torch.mul, Tensor.mul)
_SUMS = (torch.add, Tensor.add)
# With whole numbers as arguments, these keep each number and their order.
_SHAPES = (Tensor.flatten, Tensor.view, Tensor.reshape, Tensor.squeeze, Tensor.unsqueeze)


class _Value(Tensor):
    """A parameter in any shape, times ``factor`` and plus a constant."""

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
        alone: whether nothing else was done with them in this forward.
        captures: whether gradients are captured here.
        uses: the names of parameters, once for each use.
    """

    def __init__(self, tape: Tape, module: nn.Module, own: Mapping[str, nn.Parameter]) -> None:
        self.tape, self.module, self.own = tape, module, own
        self.alone, self.captures, self._runs = True, False, True
        self.uses: list[str] = []
        self.values: dict[str, Tensor] = {}
        for name, parameter in own.items():
            leaf = parameter.detach().requires_grad_()
            leaf.register_hook(partial(self._refuse, name))
            self.values[name] = self._value(leaf, name, 1.0)

    def _refuse(self, name: str, grad: Tensor) -> None:
        """Note a use that was not seen, as in an autograd function of the module's own. Raise if it
        is too late for that."""
        self.alone = False
        if self.captures:
            raise UnaccountedGradientError(
                f"A gradient reached {name!r} of {self.tape.describe(self.module)} on a way that "
                "the engine does not see. Freeze this parameter (requires_grad_(False)), or "
                "register a clipping rule for the module (hf_dp.clipping.register_rule)."
            )

    def _value(self, tensor: Tensor, of: str, factor: float) -> Tensor:
        value = tensor.as_subclass(_Value)
        value.seen_by, value.of, value.factor = self, of, factor
        return value

    def end(self, output: Any, known: bool) -> Any:
        """Return what the forward returned, which is over, without values. Gradients are captured
        if nothing else was done with the values, and that is ``known`` of the module."""
        found = any(isinstance(each, _Value) for each in pytree.tree_leaves(output))
        self.alone = self.alone and not found and set(self.uses) == set(self.own)
        self._runs, self.captures = False, self.alone and known
        return pytree.tree_map_only(_Value, _constant, output)

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return what a function makes of arguments with a value among them."""
        if self._runs and not kwargs and args:
            first, *others = args
            of_numbers = all(isinstance(each, int) for each in pytree.tree_leaves(others))
            if function in _SHAPES and isinstance(first, _Value) and of_numbers:
                return self._value(function(*args), first.of, first.factor)
            if function in (*_PRODUCTS, *_SUMS) and len(args) == 2:
                value, x = args if isinstance(first, _Value) else args[::-1]
                is_product = function in _PRODUCTS
                if isinstance(x, (int, float)):
                    factor = value.factor * (x if is_product else 1)
                    return self._value(function(*args), value.of, factor)
                if _fits(value, x) and self.tape.seems_by_example(x):
                    output = function(x, _constant(value))
                    return self._capture(output, value, x if is_product else None)
        args, kwargs = pytree.tree_map_only(_Value, _constant, (args, dict(kwargs)))
        found = function(*args, **kwargs)
        if self._runs and torch.is_grad_enabled():  # then a gradient may come back through tensors
            self.alone &= not any(isinstance(each, Tensor) for each in pytree.tree_leaves(found))
        return found

    def _capture(self, output: Tensor, value: _Value, x: Tensor | None) -> Tensor:
        self.uses.append(value.of)
        see = partial(self._see, value.of, value.factor, _without_ones(value))
        # The output has memory of its own, which autograd does not read.
        return seen_in_backward(output, self.own[value.of], lambda fresh: fresh.data, see, x)

    def _see(
        self,
        name: str,
        factor: float,
        shape: torch.Size,
        saved: Sequence[Tensor | None],
        grad: Tensor,
    ) -> None:
        if not self.captures:
            return
        dtype, (x,) = accumulation_dtype(grad.dtype), saved
        terms = self.tape.by_example(self.module, grad).to(dtype) * factor
        if x is not None:
            terms *= self.tape.by_example(self.module, x)
        total = sum_of(positions(terms, len(shape)), dtype)
        gradients = total.gradients.view(-1, *self.own[name].shape)
        self.tape.capture(self.module, name, Dense(gradients, True, total.of_terms))


def _constant(value: Tensor) -> Tensor:
    return value.detach().as_subclass(Tensor)


def _without_ones(value: Tensor) -> torch.Size:
    """Return the shape without ones in front."""
    shape = value.shape
    while shape and shape[0] == 1:
        shape = shape[1:]
    return shape


def _fits(value: Tensor, x: Any) -> bool:
    """Return whether x has examples in front of the value's shape. A tensor that depends on no
    weight that trains may be one that all examples share."""
    if not isinstance(x, Tensor) or isinstance(x, _Value) or not x.requires_grad:
        return False
    if not torch.is_grad_enabled():
        return False
    shape = _without_ones(value)
    behind = len(shape) < x.dim() >= value.dim() and x.shape[x.dim() - len(shape) :] == shape
    return behind and x.is_floating_point() and value.is_floating_point()
