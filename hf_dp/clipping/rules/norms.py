"""Layer, root-mean-square and group norms.

With x_hat the normalized input, the weight gradient is ``sum_t g_t * x_hat_t`` and the bias
gradient ``sum_t g_t``. Both are as small as one position's activation, so they are formed per
example at once.
"""

from __future__ import annotations

import ast
import functools
import inspect
import logging
import textwrap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.bit.modeling_bit import BitGroupNormActivation

from hf_dp.clipping.gradients import Dense, Unformed, positions, sum_of, summed
from hf_dp.clipping.rounding import accumulation_dtype
from hf_dp.clipping.rules.rule import RULES, Found, Kept, Use, owns_weight, register_rule
from hf_dp.clipping.sharding import plain_class
from hf_dp.clipping.tape import Tape

logger = logging.getLogger(__name__)


def _run_layer_norm(use: Use, x: Tensor) -> tuple[Tensor, Kept]:
    module = use.module
    use.tape.refuse_parameter(module, x)
    if torch.is_autocast_enabled(x.device.type) and x.device.type == "cuda":
        x = x.float()  # as autocast does on this device
    output, mean, rstd = torch.native_layer_norm(
        x, module.normalized_shape, module.weight, module.bias, module.eps
    )
    return output, (x, mean, rstd) if "weight" in use.own else ()


@register_rule(nn.LayerNorm, run=_run_layer_norm, serves=owns_weight, is_fresh=True)
def _layer_norm(use: Use, kept: Sequence[Tensor], grad: Tensor) -> Found:
    dims = len(use.module.normalized_shape)
    found = {}
    if "weight" in use.own:
        found["weight"] = Unformed(_of_weight, (*kept, grad), (dims,))
    if "bias" in use.own:
        found["bias"] = Unformed(_of_positions, (grad,), (dims, accumulation_dtype(grad.dtype)))
    return found


def _of_weight(x: Tensor, mean: Tensor, rstd: Tensor, grad: Tensor, dims: int) -> Dense:
    dtype = accumulation_dtype(grad.dtype)
    return _of_positions((x.to(dtype) - mean).mul_(rstd).mul_(grad), dims, dtype)


def _of_positions(terms: Tensor, dims: int, dtype: torch.dtype) -> Dense:
    total = sum_of(positions(terms, dims), dtype)
    total.gradients = total.gradients.view(-1, *terms.shape[-dims:])
    return total


@register_rule(
    nn.RMSNorm,
    serves=lambda module: (
        set(module._parameters) == {"weight"} and owns_weight(module) and module.weight.dim() == 1
    ),
    is_fresh=True,
)
def _rms_norm(use: Use, kept: Sequence[Tensor], grad: Tensor) -> Found:
    """Return the weight's gradients, which are the same for Gemma's ``(1 + w) x_hat``."""
    (x,), module = kept, use.module
    eps = getattr(module, "variance_epsilon", None)
    eps = getattr(module, "eps", None) if eps is None else eps
    if eps is None:  # nn.RMSNorm's default: that of the type in which it computes
        eps = torch.finfo(accumulation_dtype(x.dtype)).eps
    # x_hat as the forward rounds it: transformers' classes compute in float32, for any dtype.
    stock = plain_class(module) is nn.RMSNorm
    within = accumulation_dtype(grad.dtype) if stock else torch.float32
    short = not stock and not _keeps_dtype(type(module))
    return {"weight": Unformed(_of_scale, (positions(x), positions(grad)), (eps, within, short))}


def _of_scale(x: Tensor, grad: Tensor, eps: float, within: torch.dtype, short: bool) -> Dense:
    scale = torch.rsqrt(x.to(within).pow(2).mean(-1, keepdim=True) + eps)
    dtype = accumulation_dtype(grad.dtype)
    x_hat = (x.to(within) * scale).to(x.dtype) if short else x * scale
    return sum_of(x_hat.to(dtype).mul_(grad), dtype)


def _run_group_norm(use: Use, x: Tensor) -> tuple[Tensor, Kept]:
    return nn.GroupNorm.forward(use.module, x), (x,)


@register_rule(nn.GroupNorm, run=_run_group_norm, serves=owns_weight, flattens=False, is_fresh=True)
def _group_norm(use: Use, kept: Sequence[Tensor], grad: Tensor) -> Found:
    module, dtype = use.module, accumulation_dtype(grad.dtype)
    x_hat = F.group_norm(kept[0].to(dtype), module.num_groups, eps=module.eps)
    g = grad.to(dtype).reshape(len(grad), module.num_channels, -1)  # (b, channels, T)
    x_hat = x_hat.reshape(g.shape)
    return {"weight": summed(g * x_hat, dtype, 2), "bias": summed(g, dtype, 2)}


def activated_group_norm(tape: Tape, module: BitGroupNormActivation, x: Tensor) -> Tensor:
    """Run the group norm by its rule, and the activation after it as it is."""
    activated: Tensor = module.activation(RULES[nn.GroupNorm](tape, module, x))
    return activated


def _keeps_dtype(module_class: type[nn.Module]) -> bool:
    """Return whether only the variance is computed in float32, as in T5."""
    return _body(module_class.forward) == _statements(_T5_FORWARD)


# The forwards of about 190 classes named RMSNorm in transformers 5. A class is recognized only if
# its source is exactly one of these: its name says nothing about what a later version computes.
_T5_FORWARD = """
    variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    if self.weight.dtype in [torch.float16, torch.bfloat16]:
        hidden_states = hidden_states.to(self.weight.dtype)
    return self.weight * hidden_states
"""
_RMS_NORM_FORWARDS = (
    _T5_FORWARD,
    # Llama, Mistral, Qwen, Phi-3, ...
    """
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)
    """,
    # OLMo, GPT-OSS, ...: the weight multiplies before rounding
    """
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return (self.weight * hidden_states).to(input_dtype)
    """,
    # Gemma: 1 + w
    """
    output = self._norm(x.float())
    output = output * (1.0 + self.weight.float())
    return output.type_as(x)
    """,
)
_RMS_NORM_HELPER = "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)"


@functools.cache
def is_rms_norm(module_class: type) -> bool:
    """Return whether the class, by its source, computes a root-mean-square norm with a weight."""
    body = _body(getattr(module_class, "forward", None))
    found = body in map(_statements, _RMS_NORM_FORWARDS) and (
        "_norm" not in body
        or _body(getattr(module_class, "_norm", None)) == _statements(_RMS_NORM_HELPER)
    )
    if not found and module_class.__name__.endswith("RMSNorm"):
        logger.warning(
            "%s.%s has no clipping rule: its source is none of the forwards that are known. It is "
            "differentiated example by example, which is slower.",
            module_class.__module__,
            module_class.__name__,
        )
    return found


@functools.cache
def _body(function: Callable[..., object] | None) -> str:
    """Return a function's statements without docstring and comments. Return an empty string if it
    has no source, or a decorator."""
    if hasattr(function, "__wrapped__"):  # the source would be the wrapped function's
        return ""
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]  # type: ignore[arg-type]
    except (TypeError, OSError, SyntaxError):
        return ""
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        return ""
    documented = ast.get_docstring(definition) is not None
    return "\n".join(map(ast.unparse, definition.body[documented:]))


def _statements(source: str) -> str:
    return "\n".join(map(ast.unparse, ast.parse(textwrap.dedent(source)).body))
