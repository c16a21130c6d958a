"""``nn.Linear`` and GPT-2's ``Conv1D``: affine maps of the last dimension.

Inputs have any rank >= 2, or are flattened, (b * T, d). With a_t the input and g_t the output
gradient of position t, the weight's gradient is ``sum_t g_t a_t^T`` (Linear, weight out x in) or
``sum_t a_t g_t^T`` (Conv1D, weight in x out); the bias's is ``sum_t g_t``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from hf_dp.clipping.gradients import OuterProducts, summed
from hf_dp.clipping.rounding import accumulation_dtype
from hf_dp.clipping.rules._autocast import matmul_dtype
from hf_dp.clipping.rules._positions import positions
from hf_dp.clipping.tape import Tape


def linear(tape: Tape, module: nn.Linear, input: Tensor) -> Tensor:
    """Run ``nn.Linear``'s forward; capture, in backward, its parameters' gradients."""
    tape.refuse_parameter(module, input)
    return _affine(tape, module, input, False)


def conv1d(tape: Tape, module: Conv1D, x: Tensor) -> Tensor:
    """Run the forward of transformers' ``Conv1D`` (GPT-2); capture its parameters' gradients."""
    tape.refuse_parameter(module, x)
    return _affine(tape, module, x, True)


def _affine(tape: Tape, module: nn.Linear | Conv1D, x: Tensor, transposed: bool) -> Tensor:
    weight, bias = module.weight, module.bias
    tape.note_forward(module, "weight", "bias")
    return _Affine.apply(x, weight, bias, (tape, module, transposed))


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Return what the module's own forward computes, by the same operations."""
    if not transposed or bias is None:
        return F.linear(x, weight.mT if transposed else weight, bias)
    flat = torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight)
    return flat.view(*x.shape[:-1], weight.shape[1])


class _Affine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: tuple[Tape, nn.Linear | Conv1D, bool],
    ) -> Tensor:
        ctx.tape, ctx.module, ctx.transposed = call
        if torch.is_autocast_enabled(x.device.type):
            dtype = matmul_dtype(x)
            x = x.to(dtype)
            with torch.autocast(x.device.type, enabled=False):
                output = _product(
                    x, weight.to(dtype), None if bias is None else bias.to(dtype), ctx.transposed
                )
        else:
            output = _product(x, weight, bias, ctx.transposed)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        # `.data`, so that autograd does not treat it as a view: a model may change it in place
        # (Longformer does). The operator for this, _unsafe_view, has no Python binding of its own;
        # called between two large products it took 0.1 ms.
        return output.data

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        x, weight = ctx.saved_tensors
        tape, module, transposed = ctx.tape, ctx.module, ctx.transposed
        output_grads = positions(tape.by_example(module, grad))
        if ctx.needs_input_grad[1]:
            activations = positions(tape.by_example(module, x))
            pair = (activations, output_grads) if transposed else (output_grads, activations)
            tape.capture(module, "weight", OuterProducts(*pair))
        if ctx.needs_input_grad[2]:
            tape.capture(module, "bias", summed(output_grads, accumulation_dtype(grad.dtype)))
        grad_x = None
        if ctx.needs_input_grad[0]:
            matrix = weight.to(grad.dtype)
            grad_x = grad.matmul(matrix.mT if transposed else matrix)
        return grad_x, None, None, None
