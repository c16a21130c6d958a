"""``nn.LayerNorm``: with x_hat the normalised input, weight gradient ``sum_t g_t * x_hat_t``, bias gradient ``sum_t g_t``.

Both are as small as one position's activation, so they are formed per example at once and no record is kept. With m_t the
mean and r_t the scale of position t, ``sum_t g_t * x_hat_t = sum_t r_t (g_t * x_t) - sum_t r_t m_t g_t``: matrix products with
one row for each example, in one pass over the data where forming x_hat takes three.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.clipping.recorder import Tape
from hf_dp.clipping.rules._positions import positions
from hf_dp.clipping.uses import accumulation_dtype


def layer_norm(tape: Tape, module: nn.LayerNorm, input: Tensor) -> Tensor:
    """Forward of ``nn.LayerNorm`` that records, in backward, the uses of its trainable weight and bias."""
    tape.refuse_parameter(module, input)
    tape.note_forward(module.weight, module.bias)
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
        tape: Tape = ctx.tape
        dtype, dims = accumulation_dtype(grad.dtype), len(module.normalized_shape)
        g = positions(tape.by_example(module, grad), dims).to(dtype)
        if ctx.needs_input_grad[1]:
            scale, center = rstd.to(dtype).view(g.shape[:2]), mean.to(dtype).view(g.shape[:2])
            of_inputs = _scaled_sum(scale, g * positions(tape.by_example(module, x), dims))
            tape.record(module, module.weight, (of_inputs - _scaled_sum(scale * center, g)).view(-1, *weight.shape))
        if ctx.needs_input_grad[2]:
            tape.record(module, module.bias, _scaled_sum(torch.ones_like(g[..., 0]), g).view(-1, *bias.shape))
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.ops.aten.native_layer_norm_backward(
                grad, x, module.normalized_shape, mean, rstd, weight, bias, [True, False, False]
            )[0]
        return grad_x, None, None, None, None


def _scaled_sum(scales: Tensor, values: Tensor) -> Tensor:
    """``sum_t scales[:, t] * values[:, t]``: (b, T), (b, T, d) -> (b, d)."""
    return torch.bmm(scales[:, None], values)[:, 0]
