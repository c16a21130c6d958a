"""Which rule serves which class. Exact class only: a subclass may scale or shift what its parent computes.

(The plain embedding rule on Gemma's scaled embedding under-counts the norm by sqrt(hidden size), silently.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

from hf_dp.clipping.rules.embedding import embedding
from hf_dp.clipping.rules.layer_norm import layer_norm
from hf_dp.clipping.rules.linear import conv1d, linear

Rule = Callable[..., Any]

_RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    Conv1D: conv1d,
    nn.Embedding: embedding,
    nn.LayerNorm: layer_norm,
}


def find_rule(module: nn.Module) -> Rule | None:
    """The rule for this very module, or None when its class is unknown, its forward replaced or a weight parametrised."""
    if "forward" in module.__dict__ or parametrize.is_parametrized(module):
        return None
    if not isinstance(module._parameters.get("weight"), nn.Parameter):
        return None  # computed anew before each forward, as torch.nn.utils.weight_norm does
    return _RULES.get(type(module))
