"""Private attributes of transformers' models and of what accelerate makes of them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from transformers import PreTrainedConfig


def attention_of(config: PreTrainedConfig) -> str | None:
    """Return the implementation of attention that a model was loaded with."""
    return config._attn_implementation


def shift_right(model: nn.Module, ids: Tensor) -> Tensor | None:
    """Return the decoder's input for these ids, (b, T); None where the model says none.

    T5 makes it so inside a classifier, where the public method is missing.
    """
    shift = getattr(model, "_shift_right", None)
    return None if shift is None else shift(ids)


def forward_without_autocast(model: nn.Module) -> Callable[..., object] | None:
    """Return the forward that accelerate has wrapped in autocast; None for one it has not."""
    return getattr(model, "_original_forward", None)
