"""Modules and settings through which one example changes another's gradient: refused before anything runs."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from hf_dp.errors import UnsupportedModelError


def refuse_coupling(model: nn.Module) -> None:
    """Raise for anything known to couple the examples of a batch.

    Raises: UnsupportedModelError naming the module, why it couples examples and what to use instead.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) or (isinstance(module, _InstanceNorm) and module.track_running_stats):
            raise UnsupportedModelError(
                f"`{name}` is a {type(module).__name__}: in training it normalises each example with statistics of the "
                "whole batch (and stores them), so one example's gradient depends on the others and clipping it bounds "
                "nothing. Replace it by nn.GroupNorm or nn.LayerNorm before creating the trainer."
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            for option in ("max_norm", "scale_grad_by_freq", "sparse"):
                if getattr(module, option):
                    raise UnsupportedModelError(
                        f"`{name}` is a {type(module).__name__} with {option}={getattr(module, option)!r}: it changes "
                        "rows, or reads counts, that other examples share, or is sparse. Build the model without it."
                    )
    config = getattr(model, "config", None)
    for each in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", None) or {})):
        _refuse_config(each)


def _refuse_config(config: object) -> None:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope] if not all(isinstance(value, dict) for value in rope.values()) else list(rope.values())
    for kind in kinds:
        if kind.get("rope_type", kind.get("type")) in ("dynamic", "longrope"):
            raise UnsupportedModelError(
                f"The model uses {kind.get('rope_type', kind.get('type'))} rotary embeddings, whose frequencies depend on "
                "the longest example of the batch. Set a fixed rope type (default, linear, yarn) in the config."
            )
    if getattr(config, "output_router_logits", False):
        raise UnsupportedModelError(
            "The config sets output_router_logits=True: the load-balancing loss of a mixture of experts averages over "
            "the batch and couples examples. Set it to False."
        )
