"""Dropout in a module that is run again: its masks are drawn once and reused.

The masks are drawn for the batch, kept, and given to the second run. The functions intercept
``torch.nn.functional.dropout``, which ``nn.Dropout`` also calls. Interception is entered inside the
module's forward and not around the whole model, because it does not reach the forwards that
checkpointing runs again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


def _arguments(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Tensor, float, bool]:
    return input, p, training


def random_state(device: torch.device) -> list[Tensor]:
    """Return the state of torch's generators that a forward on this device draws from."""
    return [torch.get_rng_state()] + (
        [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    )


def set_random_state(device: torch.device, state: Sequence[Tensor]) -> None:
    """Restore what :func:`random_state` returned."""
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)


class _Dropout(TorchFunctionMode, ABC):
    """A context in which dropout multiplies by a mask that the subclass provides."""

    @abstractmethod
    def mask(self, input: Tensor, p: float) -> Tensor:
        """Return the mask for one call, shaped like ``input``, of 0 and 1 / (1 - p)."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not F.dropout:
            return func(*args, **(kwargs or {}))
        input, p, training = _arguments(*args, **(kwargs or {}))
        return input * self.mask(input, p) if training and p != 0 else input


class DrawnMasks(_Dropout):
    """Masks drawn as torch draws them.

    Attributes:
        drawn: the masks, in order.
        other_draws: whether anything else drew random numbers, as fused attention may.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.drawn: list[Tensor] = []
        self.other_draws = False

    def __enter__(self) -> DrawnMasks:
        self._last = random_state(self.device)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._look()

    def mask(self, input: Tensor, p: float) -> Tensor:
        self._look()
        mask = (
            torch.zeros_like(input)
            if p == 1
            else torch.empty_like(input).bernoulli_(1 - p).div_(1 - p)
        )
        self._last = random_state(self.device)
        self.drawn.append(mask)
        return mask

    def _look(self) -> None:
        now = random_state(self.device)
        self.other_draws |= any(not torch.equal(x, y) for x, y in zip(self._last, now, strict=True))


class GivenMasks(_Dropout):
    """Given masks, in order."""

    def __init__(self, masks: Sequence[Tensor]):
        super().__init__()
        self._masks: Iterator[Tensor] = iter(masks)

    def mask(self, input: Tensor, p: float) -> Tensor:
        return next(self._masks)
