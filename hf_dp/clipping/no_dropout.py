"""Dropout and stochastic depth as identities, for the self-check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# By name: over how many of the first dimensions numbers are drawn, where examples are in the first;
# None: one for each number.
_DROPOUTS = {
    "dropout": None,
    "alpha_dropout": None,
    "dropout1d": (3, 2),
    "dropout2d": (4, 2),
    "dropout3d": (5, 2),
    "feature_alpha_dropout": (2, 2),
}


@contextmanager
def no_dropout(note: Callable[[str, int], None] | None = None) -> Iterator[None]:
    """Turn every dropout into an identity inside, wherever a training-mode forward calls it.

    ``torch.rand``, by which models skip layers (stochastic depth), returns ones: none is skipped.

    The functions are replaced and not intercepted: an interceptor (TorchFunctionMode) is off during
    backward, where gradient checkpointing runs forwards again.

    Args:
        note: called with the name of each function that would draw, and how many numbers it would.
    """
    originals = {name: getattr(F, name) for name in (*_DROPOUTS, "scaled_dot_product_attention")}
    rand = torch.rand

    def identity(name: str) -> Callable[..., Tensor]:
        def unchanged(
            input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
        ) -> Tensor:
            if note is not None and training and p > 0:
                note(name, _drawn(name, input))
            return input

        return unchanged

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(("dropout_p", "is_causal"), args[4:6], strict=False)) | kwargs
        if note is not None and given.get("dropout_p", 0.0) > 0:
            note("attention", (args[0] if args else kwargs["query"]).numel())
        given["dropout_p"] = 0.0
        return originals["scaled_dot_product_attention"](*args[:4], **given)

    def ones(*size: Any, generator: Any = None, **options: Any) -> Tensor:
        made = torch.ones(*size, **options)
        if note is not None:
            note("rand", made.numel())
        return made

    try:
        for name in _DROPOUTS:
            setattr(F, name, identity(name))
        F.scaled_dot_product_attention = attention
        torch.rand = ones  # type: ignore[assignment]
        yield
    finally:
        torch.rand = rand
        for name, function in originals.items():
            setattr(F, name, function)


def _drawn(name: str, input: Tensor) -> int:
    """Return how many numbers a dropout draws: one for each number, or for each channel."""
    channels = _DROPOUTS[name]
    if channels is None:
        return input.numel()
    dimensions, first = channels
    return input.shape[: first if input.dim() >= dimensions else 1].numel()
