"""``nn.LayerNorm``.

With x_hat the normalized input, the weight gradient is ``sum_t g_t * x_hat_t`` and the bias
gradient ``sum_t g_t``. Both are as small as one position's activation, so they are formed per
example at once and no activation is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.clipping.gradients import Dense, summed
from hf_dp.clipping.rounding import accumulation_dtype
from hf_dp.clipping.rules._positions import positions
from hf_dp.clipping.tape import Tape


def layer_norm(tape: Tape, module: nn.LayerNorm, input: Tensor) -> Tensor:
    """Run ``nn.LayerNorm``'s forward; capture, in backward, its parameters' gradients."""
    tape.refuse_parameter(module, input)
    weight, bias = module.weight, module.bias
    tape.note_forward(module, "weight", "bias")
    if torch.is_autocast_enabled(input.device.type) and input.device.type == "cuda":
        input = input.float()  # as autocast does on this device
    return _LayerNorm.apply(input, weight, bias, module, tape)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, module: nn.LayerNorm, tape: Tape
    ) -> Tensor:
        output, mean, rstd = torch.native_layer_norm(
            x, module.normalized_shape, weight, bias, module.eps
        )
        ctx.module, ctx.tape = module, tape
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        x, mean, rstd, weight, bias = ctx.saved_tensors
        module: nn.LayerNorm = ctx.module
        tape: Tape = ctx.tape
        dtype, dims = accumulation_dtype(grad.dtype), len(module.normalized_shape)
        if ctx.needs_input_grad[1]:
            products = (x.to(dtype) - mean).mul_(rstd).mul_(grad)
            tape.capture(module, "weight", _summed(tape.by_example(module, products), dims, dtype))
        if ctx.needs_input_grad[2]:
            tape.capture(module, "bias", _summed(tape.by_example(module, grad), dims, dtype))
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.ops.aten.native_layer_norm_backward.default(
                grad, x, module.normalized_shape, mean, rstd, weight, bias, [True, False, False]
            )[0]
        return grad_x, None, None, None, None


def _summed(values: Tensor, dims: int, dtype: torch.dtype) -> Dense:
    """Return sums over positions, (b, *features), with features in the last ``dims`` dimensions."""
    found = summed(positions(values, dims), dtype)
    if dims > 1:
        found.gradients = found.gradients.view(-1, *values.shape[-dims:])
    return found
