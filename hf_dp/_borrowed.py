"""What hf_dp uses of other libraries beyond their public API.

The private methods of Trainer that ``hf_dp.trainer`` overrides stay there, and those of TRL in
``trl_preparation``. A test lists all of them and fails by name where one is gone or has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.fx import GraphModule
from transformers.integrations import moe

if TYPE_CHECKING:
    from peft import PeftConfig
    from peft.tuners.tuners_utils import BaseTuner


def shift_right(model: nn.Module, ids: Tensor) -> Tensor | None:
    """Return the decoder's input for these ids, (b, T); None where the model says none.

    T5 makes it so inside a classifier, where the public method is missing.
    """
    shift = getattr(model, "_shift_right", None)
    return None if shift is None else shift(ids)


def is_experts(module: nn.Module) -> bool:
    """Return whether a module holds the experts of a mixture as ``grouped_mm`` reads them, without
    biases and all of them in this process: its class has the decorator that says so."""
    forward = getattr(type(module), "forward", None)
    others = ("has_bias", "has_post_expert_norm", "_is_expert_parallel")
    return getattr(forward, "__code__", None) is _OF_EXPERTS and not any(
        getattr(module, name) for name in others
    )


_OF_EXPERTS = moe.use_experts_implementation(type("Experts", (nn.Module,), {})).forward.__code__


def routers_of(model: nn.Module) -> list[Any]:
    """Return the routers of a mixture of experts, in order, of which transformers records the first
    output, logits (N, E). The usual ones return scores and the chosen experts, (N, k), after it."""
    recorded = [getattr(each, "_can_record_outputs", None) or {} for each in model.modules()]
    recorders = [each["router_logits"] for each in recorded if "router_logits" in each]
    classes = {each.target_class for each in recorders if each.index == 0}
    return [each for each in model.modules() if type(each) in classes]


def gated(module: Any, x: Tensor) -> Tensor:
    """Return what experts make of their first product."""
    inner: Tensor = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    return inner


def forward_without_autocast(model: nn.Module) -> Callable[..., object] | None:
    """Return the forward that accelerate has wrapped in autocast; None for one it has not."""
    return getattr(model, "_original_forward", None)


def traced(function: Callable[..., object], *args: Sequence[Tensor]) -> GraphModule:
    """Return the graph of a function of lists of tensors, as differentiable as the function is. It
    runs on fake tensors, without values, so a branch on one is an error and is not fixed in the
    graph; other tensors that it reads, a model's weights, are the graph's attributes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    made = make_fx(function, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)
    return made(*args)


def register_method(name: str, config: type[PeftConfig], tuner: type[BaseTuner]) -> None:
    """Let ``get_peft_model`` build ``tuner`` for such a configuration, whose peft_type is ``name``.
    ``peft.utils.register_peft_method`` takes only methods that are members of PEFT's own enum."""
    from peft import mapping

    key: Any = name
    mapping.PEFT_TYPE_TO_CONFIG_MAPPING[key] = config
    mapping.PEFT_TYPE_TO_TUNER_MAPPING[key] = tuner
    mapping.PEFT_TYPE_TO_PREFIX_MAPPING[key] = tuner.prefix
