"""Affine maps (``nn.Linear``, GPT-2's ``Conv1D``, ``nn.Conv2d``) and ``nn.Embedding``.

Inputs of the first two have any rank >= 2, or are flattened, (b * T, d). With a_t the input and g_t
the output gradient of position t, the weight's gradient is ``sum_t g_t a_t^T`` (Linear, weight out
x in) or ``sum_t a_t g_t^T`` (Conv1D, weight in x out); the bias's is ``sum_t g_t``.

``Conv2d`` is an affine map of the patch under the kernel, at each output position. In the patch
embedding of a vision transformer the patches do not overlap and together are no larger than the
image.

The gradient of row k of an embedding's weight is the sum of output gradients at the positions that
looked k up. A subclass (Gemma's and BART's scaled embeddings, the shifted positions of OPT and
BART) runs its own forward; only its call of ``torch.nn.functional.embedding`` on its weight is
captured, so autograd differentiates what it does before and after. If a subclass uses its weight in
any other way, autograd writes a gradient for it, which the engine refuses.

``padding_idx`` gets no gradient, as in autograd. Indices shared by all examples, of shape (1, ...),
are expanded to the batch: their output gradient would arrive summed over examples, and no
per-example gradient could be recovered from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from hf_dp.clipping.gradients import (
    Lookups,
    OuterProducts,
    PerExampleGradient,
    Unformed,
    positions,
    summed,
)
from hf_dp.clipping.rounding import accumulation_dtype, matmul_dtype
from hf_dp.clipping.rules.rule import RULES, Found, Kept, Use, owns_weight, register_rule
from hf_dp.clipping.tape import Context, Tape
from hf_dp.errors import UnsupportedModelError


def _run_affine(use: Use, x: Tensor) -> tuple[Tensor, Kept]:
    module = use.module
    use.tape.refuse_parameter(module, x)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(matmul_dtype(x))
        output = _Product.apply(x, module.weight, module.bias, isinstance(module, Conv1D))
    else:
        output = type(module).forward(module, x)
    return output, (x if "weight" in use.own else None,)


@register_rule(nn.Linear, FalconLinear, Conv1D, run=_run_affine, serves=owns_weight, is_fresh=True)
def _affine(use: Use, kept: Kept, grad: Tensor) -> Found:
    found: dict[str, PerExampleGradient | Unformed] = {}
    grads = positions(grad)
    if kept[0] is not None:
        inputs = positions(kept[0])
        transposed = isinstance(use.module, Conv1D)
        found["weight"] = OuterProducts(*((inputs, grads) if transposed else (grads, inputs)))
    if "bias" in use.own:
        found["bias"] = summed(grads, accumulation_dtype(grad.dtype))
    return found


class _ProductContext(Context, Protocol):
    transposed: bool


class _Product(torch.autograd.Function):
    """A layer's product under autocast, whose graph holds the weight itself and no cast copy.
    ``transposed`` says that the weight is stored in x out."""

    @staticmethod
    def forward(
        ctx: _ProductContext, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool
    ) -> Tensor:
        ctx.transposed = transposed
        ctx.save_for_backward(weight)
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            if not transposed or bias is None:
                return F.linear(x, weight.mT if transposed else weight, bias)
            flat = torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight)
            return flat.view(*x.shape[:-1], weight.shape[1])

    @staticmethod
    def backward(ctx: _ProductContext, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        weight = ctx.saved_tensors[0].to(grad.dtype)
        return grad.matmul(weight.mT if ctx.transposed else weight), None, None, None


def _is_plain(module: nn.Conv2d) -> bool:
    """Return whether the rule covers this module: one group, and zeros for padding."""
    zeros = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return module.groups == 1 and zeros and owns_weight(module)


@register_rule(nn.Conv2d, serves=_is_plain, flattens=False, is_fresh=True)
def _conv2d(use: Use, kept: Sequence[Tensor], grad: Tensor) -> Found:
    module = use.module
    x = kept[0].to(grad.dtype)
    # (b, T, in * kh * kw)
    patches = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride).mT
    grads = grad.flatten(2).mT  # (b, T, out)
    bias = summed(grads, accumulation_dtype(grad.dtype))
    return {"weight": OuterProducts(grads, patches), "bias": bias}


def _look_up(use: Use, input: Tensor) -> tuple[Tensor, Kept]:
    # The engine refused ``max_norm``, ``scale_grad_by_freq`` and ``sparse`` when it was entered.
    examples = use.tape.examples
    if examples is not None and examples > 1 and input.dim() >= 2 and input.shape[0] == 1:
        input = input.expand(examples, *input.shape[1:])
    return F.embedding(input, use.module.weight, use.module.padding_idx), (input,)


@register_rule(nn.Embedding, run=_look_up, serves=owns_weight, flattens=False, is_fresh=True)
def _embedding(use: Use, kept: Sequence[Tensor], grad: Tensor) -> Found:
    tokens = kept[0].reshape(len(kept[0]), -1)
    grad = grad.reshape(*tokens.shape, -1)
    padding = use.module.padding_idx
    if padding is not None:
        grad = grad.masked_fill((tokens == padding)[..., None], 0)
    return {"weight": Lookups(tokens, grad)}


def embedding_subclass(tape: Tape, module: nn.Embedding, *args: object, **kwargs: object) -> object:
    """Run the subclass's own forward and capture its lookups."""
    forward: Callable[..., object] = type(module).forward
    with _CapturedLookups(tape, module):
        return forward(module, *args, **kwargs)


class _CapturedLookups(TorchFunctionMode):
    def __init__(self, tape: Tape, module: nn.Embedding):
        super().__init__()
        self.tape, self.module = tape, module

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if not (func is F.embedding and len(args) > 1 and args[1] is self.module.weight):
            return func(*args, **(kwargs or {}))
        names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
        given = {**dict(zip(names, args[2:], strict=False)), **(kwargs or {})}
        padding, _ = given.pop("padding_idx", None), given.pop("norm_type", None)
        if padding != self.module.padding_idx or any(
            value is not None and value is not False for value in given.values()
        ):
            raise UnsupportedModelError(
                f"{self.tape.describe(self.module)} calls F.embedding with padding_idx={padding} "
                f"and {given}. Expected its own padding_idx={self.module.padding_idx} and no other "
                "option. Change the call, or freeze the module (requires_grad_(False))."
            )
        return RULES[nn.Embedding](self.tape, self.module, args[0])
