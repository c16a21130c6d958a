"""The tape: which trainable parameter met which input and output gradient in one backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.clipping.gradients import Dense, PerExampleGradient, accumulation_dtype, compact
from hf_dp.errors import UnaccountedGradientError, UnsupportedModelError

Sink = Callable[[nn.Parameter, PerExampleGradient], None]


class Tape:
    """Hands each :class:`~hf_dp.clipping.gradients.Use` of a parameter to a sink while a backward pass
    runs.

    ``examples`` is the batch size seen by the model's own forward (None before it ran); what is
    shared by all examples (position ids of shape (1, T)) is expanded to it, so that each example
    gets its own gradient.
    """

    def __init__(self, names: Mapping[nn.Module, str] | None = None) -> None:
        self.examples: int | None = None
        self.bypassed = False  # True while the originals run, for modules without a rule
        self.calls: list[
            Any
        ] = []  # forwards of modules without a rule that received output gradients
        self._forwards: list[Tensor | None] = []  # what the forward used, as often as it did
        self._batches: set[tuple[int, int]] = (
            set()
        )  # first dimension and positions of what the forward worked on
        self._names = names or {}
        self._open_for: int | None = None
        self._sink: Sink | None = None

    @contextmanager
    def capturing(self, examples: int, sink: Sink) -> Iterator[None]:
        """Inside, a backward pass over ``examples`` per-example losses is recorded."""
        self._open_for, self._sink, self.calls = examples, sink, []
        try:
            yield
        finally:
            for call in self.calls:
                call.output_grads.clear()
            self._open_for, self._sink, self.calls = None, None, []

    @contextmanager
    def originals(self) -> Iterator[None]:
        """Inside, every recorded module runs its own forward."""
        before, self.bypassed = self.bypassed, True
        try:
            yield
        finally:
            self.bypassed = before

    def note_forward(self, *parameters: Tensor | None) -> None:
        """Count one use in a forward; a forward that checkpointing runs again during backward does
        not count."""
        if self._open_for is None and torch.is_grad_enabled():
            self._forwards += parameters

    def note_positions(self, tensors: Iterable[Any]) -> None:
        """Note how many positions tokens (b, T) and tensors (b, ..., d) among these have."""
        for tensor in tensors if torch.is_grad_enabled() else ():
            if isinstance(tensor, Tensor):
                shape = tensor.shape
                if len(shape) > 2:
                    self._batches.add((shape[0], shape[1:-1].numel()))
                elif len(shape) == 2 and not tensor.is_floating_point():
                    self._batches.add((shape[0], shape[1]))

    def forward_uses(self) -> Counter[nn.Parameter]:
        """How often the forward used each trainable parameter."""
        return Counter(p for p in self._forwards if isinstance(p, nn.Parameter) and p.requires_grad)

    def forget_forward(self) -> None:
        """Begin to count again."""
        self._forwards.clear()
        self._batches.clear()

    def capture_call(self, call: Any) -> None:
        """Note a module without a rule; it is differentiated when the backward pass is over."""
        self.expected_examples()
        if not any(call is known for known in self.calls):
            self.calls.append(call)

    def expected_examples(self) -> int:
        """How many examples this backward pass has. Raises: UnaccountedGradientError outside
        ``engine.backward``."""
        if self._open_for is None:
            raise UnaccountedGradientError(
                "backward() was called on a model inside a ClippingEngine, so no gradient was "
                "clipped or kept. Call engine.backward(per_example_losses) instead."
            )
        return self._open_for

    def by_example(self, module: nn.Module, tensor: Tensor, flattened: bool = True) -> Tensor:
        """``tensor`` with one row per example: as it is, or (b * T, d) seen as (b, T, d), example
        by example.

        (That flattened rows are ordered by example is what ``view(-1, d)`` gives;
        :func:`~hf_dp.clipping.self_check` tells. Rows chosen by value, such as those of masked
        tokens, are ordered likewise but not as many of each example: T must be a number of
        positions that the forward had.)
        Raises: UnaccountedGradientError outside ``ClippingEngine.backward``; UnsupportedModelError
            for another shape.
        """
        examples = self.expected_examples()
        if tensor.dim() >= 1 and tensor.shape[0] == examples:
            return tensor
        if flattened and tensor.dim() == 2 and self.is_flattened(tensor.shape[0]):
            return tensor.view(examples, -1, tensor.shape[1])
        raise UnsupportedModelError(
            f"{self.describe(module)} worked on a tensor of shape {tuple(tensor.shape)}, whose "
            f"first dimension is not the number of examples ({examples}), nor that times the "
            "positions of each, so its gradient cannot be split by example. Freeze this module "
            "(requires_grad_(False)) or pass its inputs with one row per example."
        )

    def is_flattened(self, rows: int) -> bool:
        """Whether so many rows are those of all positions of all examples."""
        examples = self.expected_examples()
        return rows % examples == 0 and (examples, rows // examples) in self._batches

    def refuse_parameter(self, module: nn.Module, input: Tensor) -> None:
        """Raise for a module applied to a parameter: its rows are no examples, however many they
        are.

        (DeBERTa normalises its table of relative positions.)
        """
        if isinstance(input, nn.Parameter):
            raise UnsupportedModelError(
                f"{self.describe(module)} is applied to a parameter of shape {tuple(input.shape)}, "
                "which all examples share, so its gradient cannot be split by example. Freeze this "
                "module and that parameter (requires_grad_(False))."
            )

    def describe(self, module: nn.Module) -> str:
        """``Linear `encoder.layer.0.dense` ``, for messages."""
        name = self._names.get(module)
        return f"{type(module).__name__} `{name}`" if name else type(module).__name__

    def capture(
        self, module: nn.Module, parameter: nn.Parameter, use: PerExampleGradient | Tensor
    ) -> None:
        """Hand over one use of a parameter by ``module``; a tensor is its per-example gradient (b,
        *shape).

        Raises: UnsupportedModelError when the shape is not that of per-example gradients of this
            parameter.
        """
        if isinstance(use, Dense):
            use = use.gradients
        if isinstance(use, Tensor):
            use = Dense(use.to(accumulation_dtype(use.dtype)))
        if not use.fits(parameter.shape, self.expected_examples()):
            shapes = {name: tuple(value.shape) for name, value in vars(use).items()}
            raise UnsupportedModelError(
                f"The clipping rule of {self.describe(module)} gave {type(use).__name__} of shapes "
                f"{shapes} for a parameter of shape {tuple(parameter.shape)} and {self._open_for} "
                "examples. Correct the rule's gradients function."
            )
        assert self._sink is not None
        for each in compact([use], parameter.shape):
            self._sink(parameter, each)
