"""``nn.Embedding``: the gradient of row k is the sum of output gradients at positions that looked k up.

``padding_idx`` gets no gradient, as in autograd. Indices shared by all examples, shape (1, ...), are expanded to the
batch: their output gradient would arrive summed over examples, from which no per-example gradient can be recovered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dp.clipping.recorder import Tape
from hf_dp.clipping.uses import Lookups


def embedding(tape: Tape, module: nn.Embedding, input: Tensor) -> Tensor:
    """Forward of ``nn.Embedding`` that records, in backward, which rows each example looked up.

    (``max_norm``, ``scale_grad_by_freq`` and ``sparse`` were refused when the engine was entered.)
    """
    if tape.examples is not None and tape.examples > 1 and input.dim() >= 1 and input.shape[0] == 1:
        input = input.expand(tape.examples, *input.shape[1:])
    return _Embedding.apply(input, module.weight, module, tape)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, module: nn.Embedding, tape: Tape) -> Tensor:
        ctx.module, ctx.tape = module, tape
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, weight, module.padding_idx)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        (tokens,) = ctx.saved_tensors
        module: nn.Embedding = ctx.module
        ctx.tape.check_batch_first(module, tokens)
        if ctx.needs_input_grad[1]:
            tokens = tokens.reshape(tokens.shape[0], -1)
            grad = grad.reshape(*tokens.shape, -1)
            if module.padding_idx is not None:
                grad = grad.masked_fill((tokens == module.padding_idx)[..., None], 0)
            ctx.tape.record(module.weight, Lookups(tokens, grad))
        return None, None, None, None
