"""Methods that compute, from parameters alone, something that all examples share.

Their results have no example dimension, so the gradient that arrives at a parameter is already a
sum over examples. The engine therefore expands the result to the batch first
(:func:`~hf_dp.clipping.fallback.shared_method`). These methods are known by class and name:

* relative position biases: T5 and its family (``compute_bias``), MPNet (``compute_position_bias``);
* the prompt of PEFT's prompt tuning and p-tuning (``get_prompt``), computed once and repeated.

Any other method like these is refused because of the shape of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from peft import PeftModel, PeftType
from peft.tuners.ln_tuning.layer import LNTuningLayer
from torch import Tensor, nn
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

_BIAS_METHODS = {"compute_bias", "compute_position_bias"}
_BIAS_TABLE = "relative_attention_bias"
_EXPANDED_BY_PEFT = {PeftType.PROMPT_TUNING, PeftType.P_TUNING}


@dataclass(frozen=True)
class SharedMethod:
    """A method of ``module``, how to call it for one example, and the parameters it reads."""

    name: str
    call: Callable[..., Any]
    parameters: dict[str, nn.Parameter]


def find_shared_method(module: nn.Module) -> SharedMethod | None:
    """Return this module's shared method, if it has one that reads a trainable parameter."""
    if isinstance(module, PeftModel):
        found = _prompt(module)
    else:
        found = _position_bias(module)
    return found if found is not None and found.parameters else None


def _position_bias(module: nn.Module) -> SharedMethod | None:
    table = module._modules.get(_BIAS_TABLE)
    if table is None:
        return None
    names = [name for name in _BIAS_METHODS if callable(getattr(type(module), name, None))]
    if not isinstance(table, (nn.Embedding, LNTuningLayer)) or len(names) != 1:
        return None
    method = getattr(type(module), names[0])
    if isinstance(module, MPNetEncoder):
        # Its method expands to the batch itself, so it is given one example.
        def call(owner: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return method(owner, x[:1], *args, **kwargs)
    else:
        call = method
    return SharedMethod(names[0], call, _trainable(table, _BIAS_TABLE))


def _prompt(module: PeftModel) -> SharedMethod | None:
    encoders = module._modules.get("prompt_encoder")
    config = (
        module.peft_config.get(module.active_adapter)
        if isinstance(module.active_adapter, str)
        else None
    )
    if encoders is None or config is None or config.peft_type not in _EXPANDED_BY_PEFT:
        return None

    def call(owner: Any, batch_size: int, *args: Any, **kwargs: Any) -> Tensor:
        return type(owner).get_prompt(owner, 1, *args, **kwargs)

    return SharedMethod("get_prompt", call, _trainable(encoders, "prompt_encoder"))


def _trainable(module: nn.Module, prefix: str) -> dict[str, nn.Parameter]:
    return {f"{prefix}.{name}": p for name, p in module.named_parameters() if p.requires_grad}
