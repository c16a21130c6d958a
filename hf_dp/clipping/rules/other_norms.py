"""Root-mean-square and group norms: with x_hat the normalised input, weight gradient ``sum_t g_t * x_hat_t`` and bias gradient
``sum_t g_t``, as small as one position's activation: formed per example at once."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dp.clipping.rules._positions import positions
from hf_dp.clipping.rules.pair import PairRule
from hf_dp.clipping.uses import accumulation_dtype


def _keep_input(module: nn.Module, input: Tensor) -> tuple[Tensor]:
    return (input,)


def _rms_norm_gradients(module: nn.Module, kept: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
    """Also of Gemma's ``(1 + w) x_hat``: the derivative by w is the same."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    (x,) = kept
    eps = getattr(module, "variance_epsilon", None)
    eps = getattr(module, "eps", None) if eps is None else eps
    eps = torch.finfo(x.dtype).eps if eps is None else eps  # nn.RMSNorm's default
    # x_hat as the forward rounds it: transformers' classes compute in float32, whatever the model's dtype.
    x_hat = positions(x, weight.dim()).to(accumulation_dtype(x.dtype) if type(module) is nn.RMSNorm else torch.float32)
    x_hat = x_hat * torch.rsqrt(x_hat.pow(2).mean(-1, keepdim=True) + eps)
    dtype = accumulation_dtype(grad.dtype)
    products = x_hat.to(x.dtype).to(dtype).mul_(positions(grad, weight.dim()))
    return {"weight": products.sum(1).view(-1, *weight.shape)}


def _group_norm_gradients(module: nn.GroupNorm, kept: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
    dtype = accumulation_dtype(grad.dtype)
    x_hat = F.group_norm(kept[0].to(dtype), module.num_groups, eps=module.eps)
    g = grad.to(dtype).reshape(len(grad), module.num_channels, -1)  # (b, channels, T)
    x_hat = x_hat.reshape(g.shape)
    return {"weight": (g * x_hat).sum(2), "bias": g.sum(2)}


group_norm = PairRule(_keep_input, _group_norm_gradients)
rms_norm = PairRule(lambda module, x: (x,), _rms_norm_gradients)

# What the forward of an RMSNorm in transformers 5 looks like, for about 190 classes of that name. A class is taken for one
# when its source is one of these, letter by letter: its name says nothing about what a next version computes.
_RMS_NORM_FORWARDS = (
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
    # T5 and its family
    """
    variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    if self.weight.dtype in [torch.float16, torch.bfloat16]:
        hidden_states = hidden_states.to(self.weight.dtype)
    return self.weight * hidden_states
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
def is_rms_norm(module_class: Any) -> bool:
    """Whether the class computes a root-mean-square norm with a weight, by its source."""
    body = _body(getattr(module_class, "forward", None))
    if body not in {_normal(ast.parse(textwrap.dedent(known)).body) for known in _RMS_NORM_FORWARDS}:
        return False
    helper = getattr(module_class, "_norm", None)
    return "_norm" not in body or _body(helper) == _normal(ast.parse(_RMS_NORM_HELPER).body)


def _body(function: object) -> str:
    """The statements of a function without docstring and comments; empty where there is no source."""
    try:
        source = textwrap.dedent(inspect.getsource(function))  # type: ignore[arg-type]
        definition = ast.parse(source).body[0]
    except (TypeError, OSError, SyntaxError):
        return ""
    statements = definition.body if isinstance(definition, ast.FunctionDef) else []
    if statements and isinstance(statements[0], ast.Expr) and isinstance(statements[0].value, ast.Constant):
        statements = statements[1:]
    return _normal(statements)


def _normal(statements: list[ast.stmt]) -> str:
    return "\n".join(ast.unparse(statement) for statement in statements)
