"""The clipping engine: sums of per-example gradients, each clipped to one norm, from an ordinary
forward.

    with ClippingEngine(model, clipping_norm=0.1) as engine:
        losses = per_example_losses(model(**inputs).logits, labels)     # (b,)
        norms = engine.backward(losses)                                 # (b,), adds to the running
        clipped sums sums = engine.collect()                                         # {parameter
        name: sum of clipped gradients}

Autograd itself computes no weight gradient. Inside the ``with``, each module that owns trainable
parameters has a forward that lets its rule see, in backward, what its parameters met.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp import _validate
from hf_dp.clipping.book_keeping import book_keeping
from hf_dp.clipping.clipped_sum import ClippedSum
from hf_dp.clipping.coupling import refuse_coupling
from hf_dp.clipping.fallback import fallback_forward, own_parameters, shared_method
from hf_dp.clipping.gradients import SMALLEST_CLIPPING_NORM, accumulation_dtype
from hf_dp.clipping.rules import find_rule
from hf_dp.clipping.shared import SharedMethod, find_shared_method
from hf_dp.clipping.tape import Tape
from hf_dp.clipping.two_pass import two_pass
from hf_dp.errors import UnaccountedGradientError, UnsupportedLossError, UnsupportedModelError
from hf_dp.plan import CLIPPINGS

# ``per_example`` is book-keeping of explicit gradients: no module has a rule, each is
# differentiated example by example.
_STRATEGIES = {"book_keeping": book_keeping, "two_pass": two_pass, "per_example": book_keeping}
STRATEGIES = tuple(_STRATEGIES)


class ClippingEngine:
    """Context manager; the forward runs inside it, on the unmodified model.

    Args:
        model: its trainable parameters (``requires_grad``) are clipped together; frozen modules are
            left alone.
        clipping_norm: C, the largest L2 norm of one example's contribution to a sum.
        clipping: ``"flat"``, one norm over all parameters; ``"automatic"`` (AUTO-S);
            ``"per_layer"``, each of the K modules that own trainable parameters to C / sqrt(K). See
            :mod:`hf_dp.clipping.weights`.
        strategy: the same sums in different ways. ``"book_keeping"``: one backward, all records
            held until its end. ``"two_pass"``: two backwards over one graph, a record held only
            while it is looked at; for models that use gradient checkpointing or fill the memory.
            ``"per_example"``: explicit per-example gradients, without rules.

    Raises:
        UnsupportedModelError: the model couples examples, or nothing in it is trainable, or (in
            backward) an input cannot be split by example. UnaccountedGradientError: a gradient
            reached a parameter past the engine.

    The sums' sensitivity to one example is C when losses are per-example, which
    :func:`hf_dp.clipping.self_check` tests; call it once for a new model. Sums and norms are
    float32, or float64 for a float64 model.
    """

    def __init__(
        self,
        model: nn.Module,
        clipping_norm: float,
        clipping: str = "flat",
        strategy: str = "book_keeping",
    ):
        self.model = model
        self.clipping_norm = _validate.positive("clipping_norm", clipping_norm)
        if self.clipping_norm < SMALLEST_CLIPPING_NORM:
            raise _validate.invalid(
                "clipping_norm",
                clipping_norm,
                f"to be at least {SMALLEST_CLIPPING_NORM}",
                "Squares of gradients as small as that are 0 in float32. Scale the loss up.",
            )
        self.clipping = _validate.one_of("clipping", clipping, CLIPPINGS)
        self.strategy = _validate.one_of("strategy", strategy, STRATEGIES)
        self._tape = Tape()
        self._restore: list[Callable[[], None]] = []
        self._everything: dict[str, nn.Parameter] = {}
        self._parameters: dict[str, nn.Parameter] = {}  # those that train
        self._groups: dict[nn.Parameter, int] = {}
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._spoiled = False

    def __enter__(self) -> ClippingEngine:
        modules = dict(self.model.named_modules())
        if self._restore or any(
            isinstance(_target(module), _Recorded) for module in modules.values()
        ):
            raise UnaccountedGradientError(
                "This model is already inside a ClippingEngine; leave that one first."
            )
        refuse_coupling(self.model)
        self._everything = dict(self.model.named_parameters())
        self._parameters = {name: p for name, p in self._everything.items() if p.requires_grad}
        if not self._parameters:
            raise UnsupportedModelError(
                "The model has no trainable parameter. Set requires_grad_(True) on what to train."
            )
        self._sums, self._spoiled = {}, False
        self._tape = Tape({module: name for name, module in modules.items()})
        self._groups = self._group()
        try:
            handle = self.model.register_forward_pre_hook(self._note_inputs, with_kwargs=True)
            self._restore.append(handle.remove)
            for module in modules.values():
                if own_parameters(module) and not isinstance(
                    module, (nn.ParameterDict, nn.ParameterList)
                ):
                    self._record(module)
                method = find_shared_method(module)
                if method is not None:
                    self._share(module, method)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        while self._restore:
            self._restore.pop()()
        self._tape = Tape()

    @property
    def groups(self) -> dict[str, int]:
        """Which parameters are clipped together, numbered from 0; inside the ``with``."""
        return {name: self._groups[parameter] for name, parameter in self._parameters.items()}

    def backward(self, losses: Tensor) -> Tensor:
        """Back-propagate per-example losses and add the clipped gradients to the running sums.

        Args: losses: (b,), each a function of its own example only, unscaled. b = 0 is allowed and
            adds nothing.
        Returns: the examples' gradient norms before clipping, (b,), detached; ``inf`` for an
            example whose norm is not finite, which is removed from the sums.
        Raises: UnsupportedLossError, UnaccountedGradientError, UnsupportedModelError.
        """
        if not self._restore:
            raise UnaccountedGradientError("engine.backward() works only inside `with engine:`.")
        if losses.dim() != 1 or not losses.is_floating_point():
            raise UnsupportedLossError(
                f"Expected per-example losses of shape (b,), got shape {tuple(losses.shape)}, "
                f"{losses.dtype}. Use reduction='none' and average each example over its own "
                "positions."
            )
        examples = len(losses)
        if examples == 0:
            return losses.detach()
        if self._tape.examples is not None and examples != self._tape.examples:
            raise UnsupportedLossError(
                f"Expected one loss for each of the {self._tape.examples} examples of the forward, "
                f"got {examples}."
            )
        self._refuse_stray_gradients(
            "before engine.backward(); call optimizer.zero_grad() after each step"
        )
        step = ClippedSum(
            self._tape,
            self._groups,
            self.clipping,
            self.clipping_norm,
            self._sums,
            check=lambda: self._refuse_stray_gradients(
                "by autograd itself, on a path that does not pass through the forward of the "
                "module that owns it (its gradient would have been added unclipped). Freeze it",
                drop=True,
            ),
        )
        try:
            # The sums are float32 also where the forward, and so perhaps this call, runs under
            # autocast.
            with torch.autocast(losses.device.type, enabled=False):
                norms = self._take(step, losses)
        except BaseException:
            self._spoiled = self._spoiled or step.adding
            raise
        finally:
            self._tape.forget_forward()
        return torch.where(torch.isfinite(norms), norms, torch.full_like(norms, torch.inf))

    def _take(self, step: ClippedSum, losses: Tensor) -> Tensor:
        """What becomes of one physical batch; a subclass may take something else than clipped sums
        from its records."""
        return _STRATEGIES[self.strategy](step, losses)

    def collect(self) -> dict[str, Tensor]:
        """The clipped sums since the last call, keyed as ``model.named_parameters()`` (zeros where
        unused), and reset."""
        if self._spoiled:
            raise UnaccountedGradientError(
                "engine.backward() failed while it added to the sums, so parts of some gradients "
                "are in them and parts are not. Leave the engine and start this logical batch "
                "again."
            )
        sums, self._sums = self._sums, {}
        return {name: sums[p] if p in sums else _zeros(p) for name, p in self._parameters.items()}

    # -- recording forwards ---

    def _group(self) -> dict[nn.Parameter, int]:
        """Parameters that are clipped together: all, or those of one owner (a tied one belongs to
        its first owner)."""
        if self.clipping != "per_layer":
            return dict.fromkeys(self._parameters.values(), 0)
        groups: dict[nn.Parameter, int] = {}
        for module in self.model.modules():
            new = [p for p in own_parameters(module).values() if p not in groups]
            groups |= dict.fromkeys(new, len(set(groups.values())))
        return groups

    def _record(self, module: nn.Module) -> None:
        """Give one module a recording forward, as an instance attribute, and note how to take it
        back."""
        previous = module.__dict__.get("forward")
        rule = None if self.strategy == "per_example" else find_rule(module)
        run = (
            partial(fallback_forward, self._tape, _original(previous))
            if rule is None
            else partial(rule, self._tape)
        )
        self._replace(module, "forward", _Recorded(self._tape, run, previous))

    def _share(self, module: nn.Module, method: SharedMethod) -> None:
        self._replace(
            module, method.name, partial(shared_method, self._tape, method.call, method.parameters)
        )

    def _replace(self, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        """Set an instance method; one that the instance had already comes back at the end."""
        previous = module.__dict__.get(name)
        object.__setattr__(module, name, types.MethodType(function, module))

        def restore() -> None:
            if previous is None:
                module.__dict__.pop(name, None)
            else:
                object.__setattr__(module, name, previous)

        self._restore.append(restore)

    def _note_inputs(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._tape.note_positions((*args, *kwargs.values()))
        named = [kwargs.get(name) for name in ("input_ids", "inputs_embeds", "pixel_values")]
        for value in (*named, *args, *kwargs.values()):
            if isinstance(value, Tensor) and value.dim() > 0:
                self._tape.examples = value.shape[0]
                return

    def _refuse_stray_gradients(self, how: str, drop: bool = False) -> None:
        found = {
            name: p
            for name, p in self._everything.items()
            if p.requires_grad and p.grad is not None
        }
        if drop:  # no optimizer may find it
            for parameter in found.values():
                parameter.grad = None
        stray = list(found)
        if stray:
            raise UnaccountedGradientError(
                f"`.grad` of {stray[0]!r} ({len(stray)} parameters in all) was set {how}."
            )


def _zeros(parameter: nn.Parameter) -> Tensor:
    return torch.zeros(
        parameter.shape, dtype=accumulation_dtype(parameter.dtype), device=parameter.device
    )


class _Recorded:
    """The forward a module has inside the engine. Called with the module, so a deep copy uses its
    own weights."""

    def __init__(self, tape: Tape, run: Callable[..., Any], previous: Callable[..., Any] | None):
        self.tape, self.run, self.previous = tape, run, previous

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.tape.bypassed:
            return _original(self.previous)(module, *args, **kwargs)
        self.tape.note_positions((*args, *kwargs.values()))
        return self.run(module, *args, **kwargs)


def _original(previous: Callable[..., Any] | None) -> Callable[..., Any]:
    """The forward a module had, as a function of the module: the class's unless an instance had one
    of its own."""
    if previous is not None:
        return lambda module, *args, **kwargs: previous(*args, **kwargs)
    return lambda module, *args, **kwargs: type(module).forward(module, *args, **kwargs)


def _target(module: nn.Module) -> object:
    return getattr(module.__dict__.get("forward"), "__func__", None)
