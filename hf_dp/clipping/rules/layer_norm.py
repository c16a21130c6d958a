"""``nn.LayerNorm``: with x_hat the normalised input, weight gradient ``sum_t g_t * x_hat_t``, bias gradient ``sum_t g_t``.

Both are as small as one position's activation, so they are formed per example at once and no record is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.clipping.recorder import Tape
from hf_dp.clipping.uses import Dense, accumulation_dtype


def layer_norm(tape: Tape, module: nn.LayerNorm, input: Tensor) -> Tensor:
    """Forward of ``nn.LayerNorm`` that records, in backward, the uses of its trainable weight and bias."""
    if torch.is_autocast_enabled(input.device.type) and input.device.type == "cuda":
        input = input.float()  # as autocast does on this device
    return _LayerNorm.apply(input, module.weight, module.bias, module, tape)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, module: nn.LayerNorm, tape: Tape) -> Tensor:
        output, mean, rstd = torch.native_layer_norm(x, module.normalized_shape, weight, bias, module.eps)
        ctx.module, ctx.tape = module, tape
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        x, mean, rstd, weight, bias = ctx.saved_tensors
        module: nn.LayerNorm = ctx.module
        ctx.tape.check_batch_first(module, grad)
        between = tuple(range(1, grad.dim() - len(module.normalized_shape)))
        dtype = accumulation_dtype(grad.dtype)
        if ctx.needs_input_grad[1]:
            normalised = ((x.to(dtype) - mean) * rstd).mul_(grad)
            ctx.tape.record(module.weight, Dense(normalised.sum(between) if between else normalised))
        if ctx.needs_input_grad[2]:
            ctx.tape.record(module.bias, Dense(grad.sum(between, dtype=dtype) if between else grad.to(dtype)))
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.ops.aten.native_layer_norm_backward(
                grad, x, module.normalized_shape, mean, rstd, weight, bias, [True, False, False]
            )[0]
        return grad_x, None, None, None, None
