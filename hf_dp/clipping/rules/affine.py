"""``nn.Linear``, GPT-2's ``Conv1D`` and ``nn.Conv2d``: affine maps.

Inputs of the first two have any rank >= 2, or are flattened, (b * T, d). With a_t the input and g_t
the output gradient of position t, the weight's gradient is ``sum_t g_t a_t^T`` (Linear, weight out
x in) or ``sum_t a_t g_t^T`` (Conv1D, weight in x out); the bias's is ``sum_t g_t``.

``Conv2d`` is an affine map of the patch under the kernel, at each output position. In the patch
embedding of a vision transformer the patches do not overlap and together are no larger than the
image.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dp.clipping.gradients import OuterProducts, PerExampleGradient, positions, summed
from hf_dp.clipping.rounding import accumulation_dtype, matmul_dtype
from hf_dp.clipping.rules.rule import Kept, Rule, Use, as_it_is


def _affine(transposed: bool) -> Rule:
    """Return the rule of a layer whose weight is out x in, or ``transposed``, in x out."""

    def run(use: Use, x: Tensor) -> tuple[Tensor, Kept]:
        module = use.module
        use.tape.refuse_parameter(module, x)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(matmul_dtype(x))
            output = _Product.apply(x, module.weight, module.bias, transposed)
        else:
            output = type(module).forward(module, x)
        return output, (x if "weight" in use.own else None,)

    def gradients(use: Use, kept: Kept, grad: Tensor) -> dict[str, Tensor | PerExampleGradient]:
        found: dict[str, Tensor | PerExampleGradient] = {}
        grads = positions(grad)
        if kept[0] is not None:
            inputs = positions(kept[0])
            found["weight"] = OuterProducts(*((inputs, grads) if transposed else (grads, inputs)))
        if "bias" in use.own:
            found["bias"] = summed(grads, accumulation_dtype(grad.dtype))
        return found

    return Rule(run, gradients)


class _Product(torch.autograd.Function):
    """A layer's product under autocast, whose graph holds the weight itself and no cast copy."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool
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
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        weight = ctx.saved_tensors[0].to(grad.dtype)
        return grad.matmul(weight.mT if ctx.transposed else weight), None, None, None


linear, conv1d = _affine(transposed=False), _affine(transposed=True)


def _conv2d_gradients(use: Use, kept: tuple[Tensor], grad: Tensor) -> dict[str, Any]:
    module = use.module
    x = kept[0].to(grad.dtype)
    # (b, T, in * kh * kw)
    patches = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride).mT
    grads = grad.flatten(2).mT  # (b, T, out)
    return {
        "weight": OuterProducts(grads, patches),
        "bias": summed(grads, accumulation_dtype(grad.dtype)),
    }


conv2d = Rule(as_it_is, _conv2d_gradients, flattens=False)


def is_plain_conv2d(module: nn.Conv2d) -> bool:
    """Return whether the rule covers this module: one group, and zeros for padding."""
    zeros = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return module.groups == 1 and zeros
