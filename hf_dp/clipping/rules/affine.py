"""Affine maps (``nn.Linear``, GPT-2's ``Conv1D``, ``nn.Conv2d``) and ``nn.Embedding``.

Inputs of the first two have any rank >= 2, or are flattened, (b * T, d). With a_t the input and g_t
the output gradient of position t, the weight's gradient is ``sum_t g_t a_t^T`` (Linear, weight out
x in) or ``sum_t a_t g_t^T`` (Conv1D, weight in x out); the bias's is ``sum_t g_t``.

``Conv2d`` is an affine map of the patch under the kernel, at each output position. In the patch
embedding of a vision transformer the patches do not overlap and together are no larger than the
image. With groups of channels, or one channel a group, gradients are formed at once. BiT's
convolutions standardize their weights first, and gradients are pulled back through that.

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

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.models.bit.modeling_bit import WeightStandardizedConv2d
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from hf_dp.clipping.gradients import (
    Dense,
    Lookups,
    OuterProducts,
    PerExampleGradient,
    Unformed,
    positions,
    summed,
)
from hf_dp.clipping.rounding import (
    accumulation_dtype,
    full_convolutions,
    full_precision,
    matmul_dtype,
)
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
    """Return whether the rule covers this module, which pads with a given number of zeros."""
    zeros = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return zeros and owns_weight(module)


def _images(use: Use, x: Tensor) -> Tensor:
    """Return x (b, channels, height, width); raise for one image without a first dimension."""
    if x.dim() == 4:
        return x
    raise UnsupportedModelError(
        f"{use.tape.describe(use.module)} got an input of shape {tuple(x.shape)}, whose first "
        "dimension is not that of the examples. Give it four dimensions, or freeze the module "
        "(requires_grad_(False))."
    )


def _padded(module: Any, x: Tensor) -> Tensor:
    down, right = module.padding
    return F.pad(x, (right, right, down, down)) if down or right else x


def _of_patches(module: Any, x: Tensor, grad: Tensor) -> OuterProducts:
    """Return output gradients (b, T, out) and patches (b, T, in * kh * kw)."""
    x = _padded(module, x.to(grad.dtype))
    *outer, row, column = x.stride()
    (down, right), (below, beside) = module.dilation, module.stride
    # The copy of this view takes half the time of F.unfold on a CPU.
    shape = (*x.shape[:2], *module.kernel_size, *grad.shape[2:])
    steps = (*outer, down * row, right * column, below * row, beside * column)
    patches = x.as_strided(shape, steps).flatten(4).flatten(1, 3)
    return OuterProducts(grad.flatten(2).mT, patches.mT)


def _of_conv_bias(grad: Tensor) -> Unformed:
    return summed(grad.flatten(2).mT, accumulation_dtype(grad.dtype))


# How many terms a convolution adds one by one. Where they are all equal, it is off by 16 eps.
_TERMS = 256


def _of_groups(module: Any, x: Tensor, grad: Tensor) -> Dense:
    """Return gradients (b, out, in / groups, kh, kw), formed by convolutions whose kernels are
    output gradients of some rows. Each group of each example is a group of them.

    A group's terms, over positions t, have the sizes |g_t| |a_t|, which add up to at most
    ``|g| sqrt(sum |a_t|^2)``, and each pixel is in at most kh kw patches a_t.
    """
    dtype, groups, kernel = accumulation_dtype(grad.dtype), module.groups, module.kernel_size
    pixels, grads = (each.to(dtype).unflatten(1, (groups, -1)) for each in (x, grad))
    sizes = [torch.linalg.vector_norm(each, dim=(2, 3, 4)) for each in (pixels, grads)]
    size = torch.linalg.vector_norm(sizes[0] * sizes[1], dim=1) * math.prod(kernel) ** 0.5
    pixels = _padded(module, pixels.flatten(0, 1).transpose(0, 1))  # (in / groups, b groups, H, W)
    step, extent = module.stride[0], module.dilation[0] * (kernel[0] - 1) + 1
    some = max(1, _TERMS // grad.shape[3])
    parts = []
    for first in range(0, grad.shape[2], some):
        rows = grads[:, :, :, first : first + some]
        used = slice(first * step, (first + rows.shape[3] - 1) * step + extent)
        kernels = rows.flatten(0, 2)[:, None]  # (b out, 1, rows, columns)
        options = {"stride": module.dilation, "dilation": module.stride}
        with full_convolutions():
            part = F.conv2d(pixels[:, :, used], kernels, groups=pixels.shape[1], **options)
        parts.append(part[..., : kernel[0], : kernel[1]])
    total = torch.stack(parts).sum(0).transpose(0, 1)  # (b out, in / groups, kh, kw)
    return Dense(total.unflatten(0, (len(x), -1)), of_terms=size)


@register_rule(nn.Conv2d, serves=_is_plain, flattens=False, is_fresh=True)
def _conv2d(use: Use, kept: Sequence[Tensor], grad: Tensor) -> Found:
    of_weight = _of_patches if use.module.groups == 1 else _of_groups
    x = _images(use, kept[0])
    return {"weight": of_weight(use.module, x, grad), "bias": _of_conv_bias(grad)}


def _run_standardized(use: Use, x: Tensor) -> tuple[Tensor, Kept]:
    module = use.module
    output = type(module).forward(module, x)
    return output, (x if module.pad is None else module.pad(x),)


@register_rule(
    WeightStandardizedConv2d,
    run=_run_standardized,
    serves=lambda module: module.groups == 1 and _is_plain(module),
    flattens=False,
    is_fresh=True,
)
def _standardized_conv2d(use: Use, kept: Sequence[Tensor], grad: Tensor) -> Found:
    """Pull the gradient G of w_hat = (w - mean) / s, with s^2 = var + eps, back to the weight w:
    (G - mean(G) - w_hat mean(G w_hat)) / s, with means over each output channel.

    G is divided by s first. What follows shrinks two orthogonal directions, so no norm grows, and
    the size of G / s bounds the rounding error.
    """
    module, dtype = use.module, accumulation_dtype(grad.dtype)
    weight = module.weight.detach().flatten(1).to(dtype)
    variance, mean = torch.var_mean(weight, 1, correction=0, keepdim=True)
    scale = torch.rsqrt(variance + module.eps)
    w_hat = (weight - mean) * scale
    products = _of_patches(module, _images(use, kept[0]), grad.to(dtype) * scale[..., None])
    both = torch.stack([torch.ones_like(w_hat), w_hat], 2) / w_hat.shape[1]
    with full_precision():
        total = torch.bmm(products.left.mT, products.right)
        mean, along = (total.transpose(0, 1) @ both).transpose(0, 1).split(1, 2)  # (b, out, 1) each
    total.sub_(mean).addcmul_(along, w_hat, value=-1)
    of_weight = Dense(total.view(-1, *module.weight.shape), of_terms=products.size())
    return {"weight": of_weight, "bias": _of_conv_bias(grad)}


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
