"""Which rule serves which class.

A rule serves its exact class only, since a subclass may scale or shift what its parent computes. On
Gemma's scaled embedding the plain embedding rule would silently underestimate the norm by a factor
of sqrt(hidden size); subclasses of ``nn.Embedding`` have a rule that runs their own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils import parametrize
from transformers.models.bit.modeling_bit import BitGroupNormActivation

from hf_dp.clipping.rules.affine import embedding_subclass
from hf_dp.clipping.rules.experts import run_experts, serves_experts
from hf_dp.clipping.rules.norms import activated_group_norm, is_rms_norm
from hf_dp.clipping.rules.rule import RULES, owns_weight
from hf_dp.clipping.rules.rule import register_rule as register_rule
from hf_dp.clipping.sharding import plain_class


def find_rule(module: nn.Module) -> Callable[..., object] | None:
    """Return the rule for this module. Return None if its class is unknown, its forward replaced or
    a weight parametrized."""
    if "forward" in module.__dict__ or parametrize.is_parametrized(module):
        return None
    own_class: Any = plain_class(module)
    rule = RULES.get(own_class)
    if rule is None and isinstance(module, nn.Embedding):
        return embedding_subclass if owns_weight(module) else None
    if own_class is BitGroupNormActivation and owns_weight(module):
        return activated_group_norm
    if rule is None and serves_experts(module):
        return run_experts
    if rule is None and is_rms_norm(own_class):
        rule = RULES[nn.RMSNorm]
    return rule if rule is not None and rule.serves(module) else None
