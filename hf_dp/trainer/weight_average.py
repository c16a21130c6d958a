"""An exponential moving average of the weights: evaluated during training, and what it ends with.

The noise of single steps averages out. The average is a function of released weights, so it costs
no privacy (De et al. 2022, arXiv 2204.13650). It is kept in the optimizer's state, and
so it is saved, vouched for and resumed as Adam's moments are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hf_dp._validate import invalid
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.trainer.argument_checks import Problems

DECAY = "weight_average_decay"
_AVERAGE, _COUNT = "weight_average", "weight_average_count"


def average_weights(optimizer: Optimizer, decay: float) -> None:
    """Let an optimizer keep an average of what it trains, from its next step on.

    It begins as the weights after the first step. After step t + 1 it is ``d average + (1 - d)
    weights`` with ``d = min(decay, (1 + t) / (10 + t))``, so that early weights are soon forgotten.

    Raises: UnsupportedArgumentError for weights that are not float32, which would round the average
        away.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.dtype != torch.float32:
                raise invalid(
                    DECAY,
                    decay,
                    f"to be unset with weights in {parameter.dtype}",
                    "Small changes of an average need float32. Load the model in float32; "
                    "bf16=True still computes in bfloat16.",
                    UnsupportedArgumentError,
                )

    @torch.no_grad()
    def update(stepped: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in _trained(stepped):
            if parameter.grad is None:
                continue
            state = stepped.state[parameter]
            if _AVERAGE not in state:
                state[_AVERAGE] = parameter.detach().clone()
                state[_COUNT] = torch.zeros((), dtype=torch.float32)
                continue
            state[_COUNT] += 1
            count = float(state[_COUNT])
            state[_AVERAGE].lerp_(parameter, 1 - min(decay, (1 + count) / (10 + count)))

    optimizer.register_step_post_hook(update)


@contextmanager
def averaged(optimizer: Any) -> Iterator[None]:
    """Put the averages in the place of the weights, inside the context."""
    pairs = list(_pairs(optimizer))
    weights = [parameter.detach().clone() for parameter, _ in pairs]
    try:
        put_averages(optimizer)
        yield
    finally:
        with torch.no_grad():
            for (parameter, _), before in zip(pairs, weights, strict=True):
                parameter.copy_(before)


@torch.no_grad()
def put_averages(optimizer: Any) -> None:
    """Put the averages in the place of the weights, for good."""
    for parameter, average in _pairs(optimizer):
        parameter.copy_(average)


def weight_average_problems(args: Any) -> Problems:
    """Return what does not go with ``weight_average_decay``."""
    decay = args.weight_average_decay
    if decay is None:
        return {}
    if not isinstance(decay, (int, float)) or isinstance(decay, bool) or not 0 < decay < 1:
        return {DECAY: invalid(DECAY, decay, "to be between 0 and 1", "0.99 is a first value.")}
    if args.load_best_model_at_end:
        return {
            DECAY: invalid(
                DECAY,
                decay,
                "to be unset with load_best_model_at_end",
                "Checkpoints hold the weights and not their average. Remove one of the two.",
                UnsupportedArgumentError,
            )
        }
    return {}


def _trained(optimizer: Any) -> Iterator[Tensor]:
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    for group in inner.param_groups:
        yield from group["params"]


def _pairs(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each parameter that was stepped, and its average."""
    inner = getattr(optimizer, "optimizer", optimizer)
    for parameter in _trained(inner):
        if (average := inner.state.get(parameter, {}).get(_AVERAGE)) is not None:
            yield parameter, average
