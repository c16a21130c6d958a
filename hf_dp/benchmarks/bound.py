"""Bound the speed that arithmetic allows: count the multiplications that exact norms add.

Flops are counted for one example, a multiply-add as two. Only products of matrices count:
everything else is of lower order, or bound by memory traffic, which no count of flops sees. A
measurement can therefore fall short of the bound.

Ordinary training. A linear layer d -> p over T positions takes 2 T d p forward, 2 T d p for the
gradient of its weight if that trains, and 2 T d p for the gradient of its input if that needs one.
That is 6 T d p, or 4 T d p where the weight is frozen. Attention takes 4 T^2 hidden a layer forward
for Q K^T and its product with V, and twice that backward, counted in full also for causal masks and
frozen projections. Embedding rows are looked up, not multiplied: 0. The forward of a checkpointed
block runs twice.

Norms. For the weights of one parameter, T counts the positions of all its uses. The cheaper of two
forms is counted: the Gram form ``sum((a a^T) * (g g^T))``, 2 T^2 (d + p) (Li et al., section 4), or
the direct form ``g^T a``, 2 T d p. A Gram matrix is symmetric, so half of it, T (T + 1)(d + p),
would do. A tied embedding and head add ``a e^T``, 2 T E d for E lookups. The direct form is counted
in full although an engine may keep what it forms in place of the weight gradient and so pay less.
Where many layers are direct (LoRA), a measurement can pass the bound.

``book_keeping`` adds the norms. ``two_pass`` also adds one more backward without weight gradients:
the input gradients and attention's backward again, and again the forward of checkpointed blocks.
The others have no bound here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from hf_dp.benchmarks.workload import Workload, make_batch
from hf_dp.losses import base_model


@dataclass(frozen=True)
class LinearUse:
    """One call of a linear layer on one example: its sizes, and which gradients it needs."""

    weight: int  # identity of the parameter: uses of one weight share it
    positions: int
    inputs: int
    outputs: int
    trains: bool = True
    input_gradient: bool = True
    recomputed: bool = False

    @property
    def product(self) -> int:
        """Return the flops of one pass over the matrix, 2 T d p."""
        return 2 * self.positions * self.inputs * self.outputs


@dataclass(frozen=True)
class Flops:
    """Flops per example: those of ordinary training, and those that exact clipping adds."""

    non_private: int
    norms: int
    norms_symmetric: int
    second_backward: int

    def bound(self, strategy: str, symmetric: bool = False) -> float | None:
        """Return the largest possible speed relative to non-private training, in (0, 1].

        The result is None for a strategy that has no bound here.
        """
        norms = self.norms_symmetric if symmetric else self.norms
        extra = {"book_keeping": norms, "two_pass": norms + self.second_backward}.get(strategy)
        return None if extra is None else self.non_private / (self.non_private + extra)


@dataclass
class Trace:
    """What the forward of one example used: linear calls, lookups and attention."""

    linear: list[LinearUse] = field(default_factory=list)
    # embedding -> positions looked up in it
    lookups: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    attention: int = 0  # flops of all attention products, forward only
    attention_recomputed: bool = False


def count_flops(trace: Trace) -> Flops:
    """Return the sums of the module docstring."""
    once_more = sum(use.product for use in trace.linear if use.recomputed)
    once_more += trace.attention * trace.attention_recomputed
    forward_backward = sum(
        use.product * (1 + use.trains + use.input_gradient) for use in trace.linear
    )
    plain, symmetric = _norm_flops(trace)
    return Flops(
        non_private=forward_backward + 3 * trace.attention + once_more,
        norms=plain,
        norms_symmetric=symmetric,
        second_backward=sum(u.product for u in trace.linear if u.input_gradient)
        + 2 * trace.attention
        + once_more,
    )


def _norm_flops(trace: Trace) -> tuple[int, int]:
    by_weight: dict[int, list[LinearUse]] = defaultdict(list)
    for use in trace.linear:
        if use.trains:
            by_weight[use.weight].append(use)
    plain = symmetric = 0
    for weight, uses in by_weight.items():
        t, d, p = sum(use.positions for use in uses), uses[0].inputs, uses[0].outputs
        direct = 2 * t * d * p
        cross = 2 * t * trace.lookups.get(weight, 0) * d
        plain += min(2 * t * t * (d + p), direct) + cross
        symmetric += min(t * (t + 1) * (d + p), direct) + cross
    return plain, symmetric


def trace_model(model: nn.Module, workload: Workload) -> Trace:
    """Run one example forward; note every linear layer, LoRA's included, with its real shapes."""
    trace = Trace()
    with _hooks(model, trace), torch.random.fork_rng():
        model(
            **{
                name: value
                for name, value in make_batch(workload, model, 1).items()
                if name != "labels"
            }
        )
    config: Any = getattr(base_model(model), "config", None)
    config = getattr(config, "base_config", config)  # an infilling classifier holds it
    trace.attention = 4 * workload.positions**2 * config.hidden_size * config.num_hidden_layers
    trace.attention_recomputed = any(_recomputes(module) for module in model.modules())
    return trace


@contextmanager
def _hooks(model: nn.Module, trace: Trace) -> Iterator[None]:
    recomputed = {
        id(part) for module in model.modules() if _recomputes(module) for part in module.modules()
    }

    def note_linear(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        weight, x = module.weight, args[0]
        assert isinstance(weight, Tensor)
        trace.linear.append(
            LinearUse(
                id(weight),
                x.numel() // x.shape[-1],
                x.shape[-1],
                output.shape[-1],
                weight.requires_grad,
                x.requires_grad,
                id(module) in recomputed,
            )  # fmt: skip
        )

    def note_lookup(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        trace.lookups[id(module.weight)] += args[0].numel()

    handles = [m.register_forward_hook(note_linear) for m in _of(model, (nn.Linear, Conv1D))]
    handles += [m.register_forward_hook(note_lookup) for m in _of(model, (nn.Embedding,))]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _of(model: nn.Module, classes: tuple[type[nn.Module], ...]) -> Iterable[nn.Module]:
    return (module for module in model.modules() if isinstance(module, classes))


def _recomputes(module: nn.Module) -> bool:
    return (
        isinstance(module, GradientCheckpointingLayer)
        and module.gradient_checkpointing
        and module.training
    )
