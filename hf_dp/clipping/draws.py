"""Random numbers of forwards: dropout under control, and draws that examples share.

**Dropout** is switched off, or uses masks that are drawn once and reused. For the self-check
dropout and stochastic depth are identities.

In a module that is run again, the masks are drawn for the batch, kept, and given to the second run.
The functions intercept ``torch.nn.functional.dropout``, which ``nn.Dropout`` also calls.
Interception is entered inside the module's forward and not around the whole model, because it does
not reach the forwards that checkpointing runs again.

**Shared draws**: a dropout mask for all, a skipped layer. Such a draw couples examples. Which of
them stand together in a physical batch depends on all of a draw's lengths, so one more example
changes whose gradients move together. Comparing gradients cannot show this, since dropout is off
there.

What every example draws for itself is twice as much for a batch that is repeated once. That is what
is asked of every draw, so no list of models or layers is needed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook as register_hook
from torch.nn.modules.module import register_module_forward_pre_hook as register_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dp.errors import SelfCheckError

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
    """Turn every dropout into an identity inside; no layer is skipped (stochastic depth).

    The functions are replaced and not intercepted: an interceptor (TorchFunctionMode) is off during
    backward, where gradient checkpointing runs forwards again. ``note`` is called with the name of
    each function that would draw, and how many numbers it would.
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


Batch = Any  # a mapping of inputs, or what else the loss takes
PerExampleLoss = Callable[[nn.Module, Batch], Tensor]  # returns (b,)

# What these operators return are the drawn numbers and nothing else.
_NUMBERS = (
    "bernoulli exponential geometric log_normal normal rand_like randn randn_like uniform"
).split()


class Draw(NamedTuple):
    """Random numbers that one operator drew while a module, by name the innermost, ran."""

    module: str
    operator: str
    numbers: int


def refuse_shared_draws(
    model: nn.Module, per_example_loss: PerExampleLoss, batch: Batch, count: int
) -> None:
    """Raise SelfCheckError where a training forward draws anything that its examples share. The
    tensors of ``batch`` have its ``count`` synthetic examples in their first dimension."""
    outside = _state_outside_torch()
    once = draws_of(model, per_example_loss, batch, count)
    twice = draws_of(model, per_example_loss, _repeated(batch, count), 2 * count)
    if _state_outside_torch() != outside:
        raise SelfCheckError(
            "A training forward draws random numbers by Python's `random` or by NumPy, so hf_dp "
            "cannot see whether the examples of a batch share them. Turn this off in the model's "
            "configuration (it may be called layerdrop), or draw with torch."
        )
    for one, two in zip(once, twice, strict=False):
        if one.operator == "randperm" or two.numbers != 2 * one.numbers:
            raise SelfCheckError(
                f"`{one.module}` draws random numbers that the examples of a batch share "
                f"({one.operator}: {one.numbers:,} numbers for {count} examples, {two.numbers:,} "
                f"for {2 * count}), so one example changes the gradients of others. Turn this off: "
                "set the module's dropout probability `p`, or its layerdrop, to 0. In a recipe: "
                "`without_dropout: ["
                f"{one.module.rpartition('.')[2] if 'dropout' in one.operator else 'layerdrop'}]`."
            )
    if len(once) != len(twice):
        raise SelfCheckError(
            f"A training forward draws random numbers {len(once)} times for {count} examples, and "
            f"{len(twice)} times for {2 * count}: how often depends on the batch. Turn off what "
            "draws them in the model's configuration."
        )


def draws_of(
    model: nn.Module, per_example_loss: PerExampleLoss, batch: Batch, count: int
) -> list[Draw]:
    """Return what a forward on ``count`` examples draws, where dropout and layer drops are on."""
    draws: list[Draw] = []
    with _innermost(model) as name:

        def note(operator: str, numbers: int) -> None:
            draws.append(Draw(name(), operator, numbers))

        with torch.no_grad(), no_dropout(note), _Noted(note):
            losses = per_example_loss(model, batch)
    if losses.shape != (count,):
        raise SelfCheckError(
            f"Expected one loss for each of {count} synthetic examples, shape ({count},), got "
            f"{tuple(losses.shape)}. Each tensor of a batch must have the examples in its first "
            "dimension."
        )
    return draws


class _Noted(TorchDispatchMode):
    """A context that notes what every random operator draws, and puts 1 for each number. With fixed
    numbers both batches take the same path, through the experts of a mixture, say. A probability of
    1 keeps a layer, and a factor of 1 changes nothing."""

    def __init__(self, note: Callable[[str, int], None]):
        super().__init__()
        self.note = note

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(first, Tensor):
            operator = func.overloadpacket.__name__.rstrip("_")
            self.note(operator, first.numel())
            if operator in _NUMBERS and first.is_floating_point():
                first.fill_(1.0)
        return result


@contextmanager
def _innermost(model: nn.Module) -> Iterator[Callable[[], str]]:
    """Provide a function that returns the name of the innermost module that is running."""
    names = {module: name for name, module in model.named_modules()}
    running = [type(model).__name__]

    def enter(module: nn.Module, args: object) -> None:
        running.append(names.get(module) or type(module).__name__)

    def leave(module: nn.Module, args: object, output: object) -> None:
        running.pop()

    entering = register_pre_hook(enter)
    leaving = register_hook(leave, always_call=True)
    with entering, leaving:  # which removes both hooks
        yield lambda: running[-1]


def _state_outside_torch() -> tuple[object, ...]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest


def _repeated(value: Batch, count: int) -> Batch:
    """Return a batch of ``count`` examples, followed by the same examples."""
    if isinstance(value, Tensor):
        return torch.cat([value, value]) if value.dim() else value
    if isinstance(value, Mapping):
        return {name: _repeated(each, count) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        if any(isinstance(each, (Tensor, Mapping)) for each in value):
            items = [_repeated(each, count) for each in value]
            return value._make(items) if hasattr(value, "_make") else type(value)(items)
        return type(value)([*value, *value]) if len(value) == count else value
    return value
