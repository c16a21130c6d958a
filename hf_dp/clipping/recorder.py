"""The tape: which trainable parameter met which input and output gradient in one backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hf_dp.clipping.uses import Dense, Lookups, OuterProducts, Use
from hf_dp.errors import UnaccountedGradientError, UnsupportedModelError


class Tape:
    """Collects :class:`~hf_dp.clipping.uses.Use` objects by parameter while a backward pass runs.

    ``examples`` is the batch size seen by the model's own forward (None before it ran); a lookup whose indices are
    shared by all examples (position ids of shape (1, T)) is expanded to it, so that each example gets its own gradient.
    """

    def __init__(self) -> None:
        self.examples: int | None = None
        self.bypassed = False  # True while the originals run, for modules without a rule
        self.calls: list[Any] = []  # forwards of modules without a rule that received output gradients
        self._open_for: int | None = None
        self._uses: dict[nn.Parameter, dict[type[Use], Use]] = {}

    def open(self, examples: int) -> None:
        """Start recording a backward pass over ``examples`` per-example losses."""
        self._open_for = examples
        self._uses, self.calls = {}, []

    def close(self) -> dict[nn.Parameter, list[Use]]:
        """Stop recording and hand over the uses, at most one of each form per parameter."""
        uses, self._uses, self.calls, self._open_for = self._uses, {}, [], None
        return {parameter: list(by_form.values()) for parameter, by_form in uses.items()}

    @contextmanager
    def originals(self) -> Iterator[None]:
        """Inside, every recorded module runs its own forward."""
        self.bypassed = True
        try:
            yield
        finally:
            self.bypassed = False

    def record_call(self, call: Any) -> None:
        """Note a module without a rule; it is differentiated when the backward pass is over."""
        if not any(call is known for known in self.calls):
            self.calls.append(call)

    def check_batch_first(self, module: nn.Module, tensor: Tensor) -> None:
        """Raise unless the first dimension of ``tensor`` counts the examples of this backward pass.

        Raises: UnaccountedGradientError outside ``ClippingEngine.backward``; UnsupportedModelError for another shape.
        """
        if self._open_for is None:
            raise UnaccountedGradientError(
                "backward() was called on a model inside a ClippingEngine, so no gradient was clipped or kept. "
                "Call engine.backward(per_example_losses) instead."
            )
        if tensor.dim() < 1 or tensor.shape[0] != self._open_for:
            raise UnsupportedModelError(
                f"{type(module).__name__} worked on a tensor of shape {tuple(tensor.shape)}, whose first dimension is "
                f"not the number of examples ({self._open_for}), so its gradient cannot be split by example. Freeze "
                "this module (requires_grad_(False)) or pass its inputs with one row per example."
            )

    def record(self, parameter: nn.Parameter, use: Use) -> None:
        """Add one use of a parameter; a second use of the same form is joined to the first."""
        by_form = self._uses.setdefault(parameter, {})
        earlier = by_form.get(type(use))
        if isinstance(earlier, OuterProducts) and isinstance(use, OuterProducts):
            use = earlier.joined(use)
        elif isinstance(earlier, Lookups) and isinstance(use, Lookups):
            use = earlier.joined(use)
        elif isinstance(earlier, Dense) and isinstance(use, Dense):
            use = earlier.joined(use)
        by_form[type(use)] = use
