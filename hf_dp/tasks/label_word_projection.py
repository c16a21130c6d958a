"""The rows of a vocabulary projection that belong to the label words, with a clipping rule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dp.clipping import register_rule
from hf_dp.clipping.gradients import Lookups, positions
from hf_dp.clipping.products import outer_sums
from hf_dp.clipping.rounding import accumulation_dtype
from hf_dp.clipping.rules.rule import Found, Use


class LabelWordProjection(nn.Module):
    """A projection onto the logits of K words, (..., K): ``x W[ids]^T + b[ids]``.

    The head of a language model computes all V of them.

    Args:
        weight: (V, d), usually the input embedding's own.
        bias: (V,), or None.
        ids: the K rows.

    Weight and bias stay the parameters of the head that they come from.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, ids: Sequence[int]):
        super().__init__()
        self.weight, self.ids = weight, tuple(ids)
        self.register_parameter("bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        rows = list(self.ids)
        return F.linear(input, self.weight[rows], None if self.bias is None else self.bias[rows])

    def extra_repr(self) -> str:
        return f"vocabulary={len(self.weight)}, ids={self.ids}"


@register_rule(LabelWordProjection)
def _gradients(use: Use, kept: Sequence[Tensor], output_grad: Tensor) -> Found:
    """Return the gradients of weight and bias as lookups.

    Row ``ids[k]`` of the weight's gradient is ``sum_t g_tk a_t``, and of the bias's ``sum_t g_tk``;
    the other rows are zero. An embedding that looks ``ids`` up has such a gradient. The inner
    product with the tied embedding's own gradient (tokens of the text that are label words) is
    therefore that of two lookups.
    """
    activations, grads = positions(kept[0]), positions(output_grad)
    dtype = accumulation_dtype(grads.dtype)
    ids = torch.tensor(use.module.ids, device=grads.device).expand(len(grads), -1)
    found = {"weight": Lookups(ids, outer_sums(grads, activations))}
    if use.module.bias is not None:
        found["bias"] = Lookups(ids, grads.sum(1, dtype=dtype)[..., None])
    return found
