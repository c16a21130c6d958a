"""``nn.Linear`` and GPT-2's ``Conv1D``: affine maps of the last dimension, input of any rank >= 2.

With a_t the input and g_t the output gradient of position t, the weight's gradient is ``sum_t g_t a_t^T`` (Linear, weight
out x in) or ``sum_t a_t g_t^T`` (Conv1D, weight in x out); the bias's is ``sum_t g_t``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from hf_dp.clipping.recorder import Tape
from hf_dp.clipping.rules._autocast import matmul_dtype
from hf_dp.clipping.uses import Dense, OuterProducts, Use, accumulation_dtype


def linear(tape: Tape, module: nn.Linear, input: Tensor) -> Tensor:
    """Forward of ``nn.Linear`` that records, in backward, the uses of its trainable weight and bias."""
    return _Affine.apply(input, module.weight, module.bias, module, tape, False)


def conv1d(tape: Tape, module: Conv1D, x: Tensor) -> Tensor:
    """Forward of transformers' ``Conv1D`` (GPT-2), recorded likewise."""
    return _Affine.apply(x, module.weight, module.bias, module, tape, True)


class _Affine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, module: nn.Module, tape: Tape, transposed: bool
    ) -> Tensor:
        dtype = matmul_dtype(x)
        x = x.to(dtype)
        ctx.module, ctx.tape, ctx.transposed = module, tape, transposed
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        with torch.autocast(x.device.type, enabled=False):
            matrix = weight.to(dtype).mT if transposed else weight.to(dtype)
            return F.linear(x, matrix, None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        x, weight = ctx.saved_tensors
        tape: Tape = ctx.tape
        module = ctx.module
        tape.check_batch_first(module, grad)
        if ctx.needs_input_grad[1]:
            tape.record(module.weight, _weight_use(x, grad, ctx.transposed))
        if ctx.needs_input_grad[2]:
            tape.record(module.bias, Dense(_positions(grad).sum(1, dtype=accumulation_dtype(grad.dtype))))
        grad_x = None
        if ctx.needs_input_grad[0]:
            matrix = weight.to(grad.dtype)
            grad_x = grad.matmul(matrix.mT if ctx.transposed else matrix)
        return grad_x, None, None, None, None, None


def _positions(tensor: Tensor) -> Tensor:
    """(b, ..., d) as (b, T, d), T = 1 when there is no dimension between."""
    return tensor[:, None] if tensor.dim() == 2 else tensor.flatten(1, -2)


def _weight_use(x: Tensor, grad: Tensor, transposed: bool) -> Use:
    left, right = _positions(grad), _positions(x)
    if transposed:
        left, right = right, left
    length, m, n = left.shape[1], left.shape[2], right.shape[2]
    # Forming G costs 2 T m n flops an example and m n numbers to keep; the Gram form 2 T^2 (m + n) flops and T (m + n)
    # numbers. Both comparisons come out the same way, so what is cheaper to compute is cheaper to keep, too.
    if m * n < length * (m + n):
        dtype = accumulation_dtype(grad.dtype)
        return Dense(torch.bmm(left.to(dtype).mT, right.to(dtype)))
    return OuterProducts(left, right)
