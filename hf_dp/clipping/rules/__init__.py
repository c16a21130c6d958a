"""Which rule serves which class.

A rule serves its exact class only, since a subclass may scale or shift what its parent computes. On
Gemma's scaled embedding the plain embedding rule would silently underestimate the norm by a factor
of sqrt(hidden size); subclasses of ``nn.Embedding`` have a rule that runs their own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

from hf_dp._validate import invalid
from hf_dp.clipping.rules.affine import conv1d, conv2d, is_plain_conv2d, linear
from hf_dp.clipping.rules.embedding import embedding, embedding_subclass
from hf_dp.clipping.rules.norms import group_norm, is_rms_norm, layer_norm, rms_norm
from hf_dp.clipping.rules.rule import Found, Rule, Use
from hf_dp.clipping.sharding import plain_class

_RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    Conv1D: conv1d,
    nn.Embedding: embedding,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
    nn.GroupNorm: group_norm,
    nn.Conv2d: conv2d,
}
_BUILT_IN = frozenset(_RULES)


def find_rule(module: nn.Module) -> Callable[..., Any] | None:
    """Return the rule for this module.

    Return None if its class is unknown, its forward replaced or a weight parametrized.
    """
    if "forward" in module.__dict__ or parametrize.is_parametrized(module):
        return None
    own_class = plain_class(module)
    rule = _RULES.get(own_class)
    if rule is not None and own_class not in _BUILT_IN:
        return rule
    weight = module._parameters.get("weight")
    if not isinstance(weight, nn.Parameter):
        return None  # computed again before each forward, as torch.nn.utils.weight_norm does
    if isinstance(module, nn.Conv2d) and not is_plain_conv2d(module):
        return None
    if rule is None and isinstance(module, nn.Embedding):
        return embedding_subclass
    if rule is None and is_rms_norm(cast(Any, own_class)) and set(module._parameters) == {"weight"}:
        return rms_norm if weight.dim() == 1 else None
    return rule


def register_rule(
    module_class: type[nn.Module],
    keep: Callable[..., tuple[Tensor, ...]],
    gradients: Callable[[Any, tuple[Tensor, ...], Tensor], Found],
) -> None:
    """Register the per-example gradients of a module class of your own.

    The rule serves this class and not its subclasses. The module's forward must return one tensor
    with the examples in its first dimension. :func:`hf_dp.clipping.self_check` checks the rule on
    synthetic examples, as it does all rules. A module without a rule also works, but more slowly:
    it is differentiated example by example.

    Args:
        keep: ``keep(module, *args, **kwargs) -> tuple of tensors``, called with the forward's
            arguments. It returns what the gradients will need of the inputs; each tensor has the
            examples in its first dimension.
        gradients: ``gradients(module, kept, output_grad) -> {parameter name: gradient}``, with an
            entry for each trainable parameter that the module owns: its per-example gradient
            (b, *parameter.shape), or, where that is large,
            :class:`~hf_dp.clipping.gradients.OuterProducts` or
            :class:`~hf_dp.clipping.gradients.Lookups`. It must not mix examples.

    Raises:
        InvalidArgumentError: ``module_class`` is not a module class, or has a rule already.

    A learned scale of each feature, for example::

        register_rule(
            Scale,
            keep=lambda module, x: (x,),
            gradients=lambda module, kept, grad: {"scale": (kept[0] * grad).flatten(1, -2).sum(1)},
        )
    """
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise invalid(
            "module_class",
            module_class,
            "to be a subclass of torch.nn.Module",
            "Pass the class itself.",
        )
    if module_class in _RULES:
        raise invalid(
            "module_class",
            module_class.__name__,
            "to have no rule yet",
            "Derive a class of your own and register that one.",
        )

    def run(use: Use, *args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        kept = keep(use.module, *args, **kwargs)
        return type(use.module).forward(use.module, *args, **kwargs), kept

    def found(use: Use, kept: Sequence[Tensor], output_grad: Tensor) -> Found:
        return gradients(use.module, tuple(kept), output_grad)

    _RULES[module_class] = Rule(run, found, is_fresh=False)
