"""The tape: which trainable parameter met which gradients in one backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hf_dp.clipping.forms import Together, compact, is_smaller_explicit, unformed
from hf_dp.clipping.gradients import Dense, OuterProducts, PerExampleGradient, Unformed
from hf_dp.clipping.rounding import accumulation_dtype
from hf_dp.clipping.scales import Scale
from hf_dp.errors import UnaccountedGradientError, UnsupportedModelError

Sink = Callable[[nn.Parameter, PerExampleGradient], None]
See = Callable[[Sequence[Tensor], Tensor], None]  # of tensors that were kept, and a gradient


def tape_of(module: nn.Module) -> Tape | None:
    """Return the tape that this module's gradients are handed to; None outside an engine."""
    inside = getattr(module.__dict__.get("forward"), "__func__", None)
    tape = getattr(inside, "tape", None)
    return tape if isinstance(tape, Tape) and not tape.bypassed else None


def has_own_forward(module: nn.Module) -> bool:
    """Return whether an instance has another forward than its class and the engine give it."""
    own = module.__dict__.get("forward")
    inside = getattr(own, "__func__", None)
    by_engine = isinstance(getattr(inside, "tape", None), Tape)
    return own is not None and not (by_engine and getattr(inside, "previous", None) is None)


class Noted(NamedTuple):
    """Tells what a forward used, once for each use, and the first dimensions and positions."""

    uses: list[nn.Parameter | None]
    batches: set[tuple[int, int]]


class Tape:
    """Hands each use of a parameter to a sink while a backward pass runs.

    What all examples share (position ids of shape (1, T)) is expanded to ``examples``, so that each
    example gets its own gradient. Where ``sharded`` (FSDP2), a parameter is whole only while its
    module runs, as another object than outside.
    """

    def __init__(self, names: Mapping[nn.Module, str] | None = None, sharded: bool = False) -> None:
        self.examples: int | None = None  # the batch size that the model's own forward saw
        self.bypassed = False  # while modules run their own forwards
        self.began = False  # a forward, which no backward has ended
        # What runs after a backward pass, for each module without a rule that it reached.
        self.after: dict[object, Callable[[], None]] = {}
        self._forwards: list[nn.Parameter | None] = []  # what the forward used, once for each use
        self._batches: set[tuple[int, int]] = set()  # first dimension and positions it worked on
        self.sharded = sharded
        self._names = names or {}
        self._slots: dict[tuple[nn.Module, str], nn.Parameter] = {}
        self._constants: dict[nn.Parameter, Tensor] = {}
        self.folded = 1  # rows that the model makes of each example, as of several choices
        self.rows_per_unit = 1  # rows whose gradients are handed over as one
        self.scales: Mapping[nn.Parameter, Scale] = {}
        self._open_for: int | None = None
        self._sink: Sink | None = None
        self._together: Together | None = None
        self._uses: Counter[nn.Parameter] = Counter()  # in the forward of this backward pass
        self.trace: Trace | None = None  # taps outputs instead of an autograd function
        self.compiled_forwards = 0

    @contextmanager
    def capturing(
        self,
        examples: int,
        sink: Sink,
        rows_per_unit: int = 1,
        reserve: Callable[[nn.Parameter], object] | None = None,
    ) -> Iterator[None]:
        """Hand what a backward pass over ``examples`` per-example losses meets inside to a sink.
        With ``reserve``, which is told at once whose a use is, small ones may come later, of
        parameters that the forward used once."""
        self._open_for, self._sink, self.after = examples * self.folded, sink, {}
        self.rows_per_unit, self._uses = rows_per_unit * self.folded, self.forward_uses()
        self._together = None if reserve is None else Together(reserve)
        try:
            yield
            if self._together is not None:
                self._together.form()
        finally:
            self._open_for, self._sink, self.after = None, None, {}
            self._together = None

    @contextmanager
    def originals(self) -> Iterator[None]:
        """Let every module run its own forward inside."""
        before, self.bypassed = self.bypassed, True
        try:
            yield
        finally:
            self.bypassed = before

    def know(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        """Note which parameters the names that ``module`` captures stand for."""
        for name, parameter in parameters.items():
            self._slots[module, name] = parameter

    def constant(self, parameter: nn.Parameter) -> Tensor:
        """Return the parameter's values, detached: the same object as long as they lie there."""
        known = self._constants.get(parameter)
        if known is None or known.data_ptr() != parameter.data_ptr():
            known = self._constants[parameter] = parameter.detach()
        return known

    def note_forward(self, module: nn.Module, *names: str) -> None:
        """Count one use of parameters of ``module`` in a forward. Not when checkpointing runs the
        forward again in backward."""
        if self._open_for is None and torch.is_grad_enabled():
            self._forwards += [self._slots.get((module, name)) for name in names]

    def note_positions(self, tensors: Iterable[object]) -> None:
        """Note how many positions tokens (b, T) and tensors (b, ..., d) among these have."""
        self.began = True
        for tensor in tensors if torch.is_grad_enabled() else ():
            if isinstance(tensor, Tensor):
                shape = tensor.shape
                if len(shape) > 2:
                    self._batches.add((shape[0], shape[1:-1].numel()))
                elif len(shape) == 2 and not tensor.is_floating_point():
                    self._batches.add((shape[0], shape[1]))

    def forward_uses(self) -> Counter[nn.Parameter]:
        """Count the forward's uses of each trainable parameter."""
        return Counter(p for p in self._forwards if p is not None and p.requires_grad)

    @contextmanager
    def rehearsing(self, trace: Trace) -> Iterator[Noted]:
        """Let ``trace`` see the forwards inside, of which nothing is counted here. Provides what
        would have been noted, for :meth:`repeat`."""
        before, noted = (self._forwards, self._batches, self.trace), Noted([], set())
        self._forwards, self._batches, self.trace = *noted, trace
        try:
            yield noted
        finally:
            self._forwards, self._batches, self.trace = before

    def repeat(self, noted: Noted) -> None:
        """Note a compiled forward, of which this was noted when it was traced."""
        self._forwards += noted.uses
        self._batches |= noted.batches
        self.compiled_forwards += 1

    def forget_forward(self) -> None:
        """Start counting again."""
        self.compiled_forwards, self.began = 0, False
        self._forwards.clear()
        self._batches.clear()

    def expected_examples(self) -> int:
        """Return how many examples this backward pass has; there is none outside the engine's."""
        if self._open_for is None:
            raise UnaccountedGradientError(
                "backward() was called on a model inside a ClippingEngine, so no gradient was "
                "clipped or kept. Call engine.backward(per_example_losses) instead."
            )
        return self._open_for

    def by_example(self, module: nn.Module, tensor: Tensor, flattened: bool = True) -> Tensor:
        """Return ``tensor`` with examples in its first dimension.

        A tensor (b, ...) is returned as it is, and (b * T, d) as (b, T, d), example by example.
        ``view(-1, d)`` orders flattened vectors by example, and
        :func:`~hf_dp.clipping.self_check` finds those that are not. Vectors selected by value, such
        as those of masked tokens, are ordered by example but not equally many for each: T must be a
        number of positions that the forward had.
        """
        examples = self.expected_examples()
        if tensor.dim() >= 1 and tensor.shape[0] == examples:
            return tensor
        if flattened and tensor.dim() == 2 and self.is_flattened(tensor.shape[0]):
            return tensor.view(examples, -1, tensor.shape[1])
        raise UnsupportedModelError(
            f"{self.describe(module)} worked on a tensor of shape {tuple(tensor.shape)}, whose "
            f"first dimension is not the number of examples ({examples}), nor that number times "
            "the positions of each, so its gradient cannot be split by example. Freeze this module "
            "(requires_grad_(False)), or pass its inputs with the examples in their first "
            "dimension (batch_first=True of torch's layers)."
        )

    def is_flattened(self, count: int) -> bool:
        """Return whether ``count`` vectors are those of all positions of all examples."""
        examples = self.expected_examples()
        return count % examples == 0 and (examples, count // examples) in self._batches

    def refuse_parameter(self, module: nn.Module, input: Tensor | None) -> None:
        """Raise for a module applied to a parameter: what it computes belongs to no example.
        DeBERTa normalizes its table of relative positions in this way."""
        if isinstance(input, nn.Parameter):
            raise UnsupportedModelError(
                f"{self.describe(module)} is applied to a parameter of shape {tuple(input.shape)}, "
                "which all examples share, so its gradient cannot be split by example. Freeze this "
                "module and that parameter (requires_grad_(False))."
            )

    def describe(self, module: nn.Module) -> str:
        """Return a name for messages, such as ``Linear `encoder.layer.0.dense` ``."""
        name = self._names.get(module)
        return f"{type(module).__name__} `{name}`" if name else type(module).__name__

    def capture(
        self,
        module: nn.Module,
        name: str,
        use: PerExampleGradient | Unformed | Tensor,
        by_unit: bool = False,
    ) -> None:
        """Hand over what one use by ``module`` gave its parameter of this name: one gradient an
        example, or (``by_unit``) one a unit already. A tensor is the per-example gradient itself,
        (b, *parameter.shape).
        """
        parameter = self._slots.get((module, name))
        if parameter is None:
            raise UnaccountedGradientError(
                f"A gradient reached {name!r} of {self.describe(module)}, which was not a "
                "trainable parameter of the model when its ClippingEngine was entered. Leave the "
                "engine, set requires_grad as wanted and enter it again."
            )
        if isinstance(use, Tensor):
            use = Dense(use)
        together = self._together if self._uses[parameter] == 1 else None
        if isinstance(use, Unformed):
            if together is not None:
                together.add(parameter, use, partial(self.capture, module, name))
                return
            use = use.formed()
        if isinstance(use, Dense):
            gradients = use.gradients.to(accumulation_dtype(use.gradients.dtype))
            use = Dense(gradients, use.owned, use.of_terms)
        examples, rows = self.expected_examples(), self.rows_per_unit
        if not use.fits(parameter.shape, examples // rows if by_unit else examples):
            shapes = {n: tuple(v.shape) for n, v in vars(use).items() if isinstance(v, Tensor)}
            raise UnsupportedModelError(
                f"The clipping rule of {self.describe(module)} gave {type(use).__name__} of shapes "
                f"{shapes} for a parameter of shape {tuple(parameter.shape)} and {examples} "
                "examples. Correct the rule's gradients function."
            )
        if rows > 1 and not by_unit:
            use = use.of_units(rows)
        if (scale := self.scales.get(parameter)) is not None:
            use = scale.of(use)
        assert self._sink is not None
        if together is not None and isinstance(use, OuterProducts) and is_smaller_explicit([use]):
            give = partial(self._sink, parameter)
            together.add(parameter, unformed(use, parameter.shape), give)
            return
        for each in compact([use], parameter.shape):
            self._sink(parameter, each)


class Trace(Protocol):
    """Stands for autograd functions while a forward is traced."""

    def tap(
        self, output: Tensor, kept: Sequence[Tensor | None], see: Callable[[Tape], See]
    ) -> Tensor:
        """Return an output whose gradient ``see(tape)`` is to see, with what was kept."""


class Context(Protocol):
    """What autograd gives the forward and backward of a function."""

    saved_tensors: tuple[Tensor, ...]  # with None where None was saved
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for backward."""


def seen_in_backward(
    output: Tensor,
    anchor: Tensor,
    as_own: Callable[[Tensor], Tensor],
    see: See,
    *kept: Tensor | None,
) -> Tensor:
    """Return an output whose backward calls ``see`` with ``kept`` and the output's gradient. The
    ``anchor``, a parameter of the module, is an input so that backward comes here in any case;
    ``as_own`` returns the output as one that an autograd function may return."""
    seen: Tensor = _Seen.apply(output, anchor, as_own, see, *kept)
    return seen


class _SeenContext(Context, Protocol):
    see: See


class _Seen(torch.autograd.Function):
    """The identity. It keeps tensors as autograd does, which checkpoints rely on."""

    @staticmethod
    def forward(
        ctx: _SeenContext,
        output: Tensor,
        anchor: Tensor,
        as_own: Callable[[Tensor], Tensor],
        see: See,
        *kept: Tensor | None,
    ) -> Tensor:
        ctx.see = see
        ctx.save_for_backward(*kept)
        return as_own(output)

    @staticmethod
    def backward(ctx: _SeenContext, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        saved = ctx.saved_tensors
        ctx.see(saved, grad)
        return grad, None, None, None, *[None] * len(saved)
