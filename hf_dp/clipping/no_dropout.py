"""Dropout as an identity, for the self-check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import functional as F

_DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)


@contextmanager
def no_dropout(note: Callable[[str, Tensor], None] | None = None) -> Iterator[None]:
    """Turn every dropout into an identity inside, wherever a training-mode forward calls it.

    The functions are replaced and not intercepted: an interceptor (TorchFunctionMode) is off during
    backward, where gradient checkpointing runs forwards again.

    Args:
        note: called with the name of each dropout that would draw, and the tensor that it is for.
    """
    originals = {name: getattr(F, name) for name in (*_DROPOUTS, "scaled_dot_product_attention")}

    def identity(name: str) -> Callable[..., Tensor]:
        def unchanged(
            input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
        ) -> Tensor:
            if note is not None and training and p > 0:
                note(name, input)
            return input

        return unchanged

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(("dropout_p", "is_causal"), args[4:6], strict=False)) | kwargs
        if note is not None and given.get("dropout_p", 0.0) > 0:
            note("attention", args[0] if args else kwargs["query"])
        given["dropout_p"] = 0.0
        return originals["scaled_dot_product_attention"](*args[:4], **given)

    try:
        for name in _DROPOUTS:
            setattr(F, name, identity(name))
        F.scaled_dot_product_attention = attention
        yield
    finally:
        for name, function in originals.items():
            setattr(F, name, function)
