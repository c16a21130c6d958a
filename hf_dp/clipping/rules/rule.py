"""A rule: how a module runs inside the engine, and the gradients of its parameters from that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp._validate import invalid
from hf_dp.clipping.gradients import PerExampleGradient, Unformed
from hf_dp.clipping.tape import Tape, seen_in_backward
from hf_dp.errors import UnsupportedModelError

Kept = tuple[Tensor | None, ...]
Found = Mapping[str, Tensor | PerExampleGradient | Unformed]


@dataclass(frozen=True)
class Use:
    """One forward of a module that has a rule."""

    tape: Tape
    module: Any
    own: tuple[str, ...]  # the names of its parameters that train


Run = Callable[..., tuple[Tensor, Kept]]
Serves = Callable[[Any], bool]  # of a module
Gradients = Callable[[Use, Any, Tensor], Found]


def keep_input(use: Use, input: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Kept]:
    """Run the module's own forward; keep its first argument."""
    return type(use.module).forward(use.module, input, *args, **kwargs), (input,)


def owns_weight(module: nn.Module) -> bool:
    """Return whether the weight is a parameter, and not computed again before each forward.
    ``torch.nn.utils.weight_norm`` does that."""
    return isinstance(module._parameters.get("weight"), nn.Parameter)


@dataclass(frozen=True)
class Rule:
    """The module runs on detached parameters, so autograd computes the gradients of its inputs.
    What the parameters' gradients need is kept, and they are formed in backward. The fields are the
    arguments of :func:`register_rule`."""

    gradients: Gradients
    run: Run = keep_input
    serves: Serves = lambda module: True
    flattens: bool = True
    is_fresh: bool = False

    def __call__(self, tape: Tape, module: nn.Module, *args: object, **kwargs: object) -> Tensor:
        parameters = module._parameters
        own = {name: p for name, p in parameters.items() if p is not None and p.requires_grad}
        use = Use(tape, module, tuple(own))
        for name, parameter in own.items():
            parameters[name] = tape.constant(parameter)  # type: ignore[assignment]
        try:
            output, kept = self.run(use, *args, **kwargs)
        finally:
            parameters.update(own)
        if not own or not torch.is_grad_enabled():
            return output
        for tensor in kept:
            tape.refuse_parameter(module, tensor)
        if not isinstance(output, Tensor):
            raise UnsupportedModelError(
                f"{tape.describe(module)} returned a {type(output).__name__}, but its clipping "
                "rule expects one tensor. Remove the rule: a module without one is differentiated "
                "example by example."
            )
        tape.note_forward(module, *own)
        if tape.trace is not None:
            by = lambda tape: partial(self._capture, replace(use, tape=tape))  # noqa: E731
            return tape.trace.tap(output, kept, by)
        # No view, so that a model may change it in place (Longformer does).
        as_own: Callable[[Tensor], Tensor] = (lambda x: x.data) if self.is_fresh else torch.clone
        see = partial(self._capture, use)
        return seen_in_backward(output, next(iter(own.values())), as_own, see, *kept)

    def _capture(self, use: Use, saved: Sequence[Tensor | None], grad: Tensor) -> None:
        tape, module = use.tape, use.module
        kept = [t if t is None else tape.by_example(module, t, self.flattens) for t in saved]
        found = self.gradients(use, kept, tape.by_example(module, grad, self.flattens))
        missing = sorted(set(use.own) - set(found))
        if missing:
            raise UnsupportedModelError(
                f"The clipping rule of {tape.describe(module)} returned gradients for "
                f"{sorted(found)} but none for its trainable {missing}. Return them from its "
                "gradients function, or freeze these parameters (requires_grad_(False))."
            )
        for name in use.own:
            tape.capture(module, name, found[name])


RULES: dict[type[nn.Module], Rule] = {}


def register_rule(
    *classes: type[nn.Module],
    run: Run = keep_input,
    serves: Serves = lambda module: True,
    flattens: bool = True,
    is_fresh: bool = False,
) -> Callable[[Gradients], Gradients]:
    """Register the decorated function: the per-example gradients of module classes.

    It is called as ``gradients(use, kept, output_grad)`` and returns ``{parameter name: gradient}``
    with an entry for at least each of ``use.own``, the parameters of ``use.module`` that train. A
    gradient is a tensor (b, *parameter.shape), or, where that is large,
    :class:`~hf_dp.clipping.gradients.OuterProducts` or :class:`~hf_dp.clipping.gradients.Lookups`.
    It must not mix examples. The tensors passed in have the examples in their first dimension, even
    if the module worked on flattened (b * T, d) inputs.

    The rule serves these classes and not their subclasses. :func:`hf_dp.clipping.self_check` checks
    it on synthetic examples, as it does all rules. A module without a rule also works, but more
    slowly: it is differentiated example by example.

    Args:
        run: ``run(use, *args, **kwargs) -> (output, kept)``, called with the forward's arguments;
            by default the module's own forward, of which the first argument is kept. The output is
            one tensor; it and each kept tensor have the examples in their first dimension.
        serves: whether the rule covers a module of these classes, by its settings.
        flattens: whether an input (b * T, d) means the same as (b, T, d).
        is_fresh: whether the output has memory of its own that nothing reads in backward, so that
            no copy is needed for a model that changes it in place.

    Raises: InvalidArgumentError for what is not a module class, or already has a rule.

    A learned scale of each feature, for example::

        @register_rule(Scale)
        def gradients(use, kept, output_grad):
            return {"scale": (kept[0] * output_grad).flatten(1, -2).sum(1)}
    """
    for each in classes:
        if not (isinstance(each, type) and issubclass(each, nn.Module)) or each in RULES:
            raise invalid(
                "classes",
                each,
                "to be subclasses of torch.nn.Module that have no rule yet",
                "Pass the class itself; derive one of your own from a class that has a rule.",
            )

    def register(gradients: Gradients) -> Gradients:
        RULES.update(dict.fromkeys(classes, Rule(gradients, run, serves, flattens, is_fresh)))
        return gradients

    return register
