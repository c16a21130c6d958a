"""Dropout under control: switched off, or with masks that are drawn once and reused.

For the self-check dropout and stochastic depth are identities.

In a module that is run again, the masks are drawn for the batch, kept, and given to the second run.
The functions intercept ``torch.nn.functional.dropout``, which ``nn.Dropout`` also calls.
Interception is entered inside the module's forward and not around the whole model, because it does
not reach the forwards that checkpointing runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

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
    make: Callable[..., Tensor] = torch.ones

    def identity(name: str) -> Callable[..., Tensor]:
        def unchanged(
            input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
        ) -> Tensor:
            if note is not None and training and p > 0:
                note(name, _drawn(name, input))
            return input

        return unchanged

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *args: object,
        **kwargs: object,
    ) -> Tensor:
        if note is not None and dropout_p > 0:
            note("attention", query.numel())
        original = originals["scaled_dot_product_attention"]
        return original(query, key, value, attn_mask, 0.0, *args, **kwargs)

    def ones(*size: object, generator: object = None, **options: object) -> Tensor:
        made = make(*size, **options)
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


class GivenMasks(TorchFunctionMode):
    """A context in which dropout multiplies by given masks of 0 and 1 / (1 - p), in order."""

    def __init__(self, masks: Sequence[Tensor] = ()):
        super().__init__()
        self._masks: Iterator[Tensor] = iter(masks)

    def mask(self, input: Tensor, p: float) -> Tensor:
        """Return the mask for one call, shaped like ``input``."""
        return next(self._masks)

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        function: Callable[..., object] = self._masked if func is F.dropout else func
        return function(*args, **(kwargs or {}))

    def _masked(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        return input * self.mask(input, p) if training and p != 0 else input


class DrawnMasks(GivenMasks):
    """Masks drawn as torch draws them."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.drawn: list[Tensor] = []  # the masks, in order
        self.other_draws = False  # whether anything else drew numbers, as fused attention may

    def __enter__(self) -> DrawnMasks:
        self._last = random_state(self.device)
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._look()

    def mask(self, input: Tensor, p: float) -> Tensor:
        self._look()
        mask = torch.zeros_like(input)
        if p != 1:
            mask.bernoulli_(1 - p).div_(1 - p)
        self._last = random_state(self.device)
        self.drawn.append(mask)
        return mask

    def _look(self) -> None:
        now = random_state(self.device)
        self.other_draws |= any(not torch.equal(x, y) for x, y in zip(self._last, now, strict=True))
