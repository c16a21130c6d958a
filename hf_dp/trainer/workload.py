"""What of each step's gradient is in the weights at the end: learning-rate schedule x momentum."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import get_scheduler

from hf_dp._validate import invalid
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.plans.bands import BANDS

STEERED = ("reduce_lr_on_plateau", "greedy")  # by metrics


def workload_of(args: Any, steps: int) -> list[float]:
    """Return, for so many steps T, how much of each step's gradient is in the weights after the
    last, up to a factor: ``sum_{t >= s} rate_t m^(t - s)``, m the momentum of SGD or Adam's beta1.
    (Adam divides by a second moment, which under noise hardly changes.)

    Args: args: a trainer's, or a recipe's with the same names.

    Raises: UnsupportedArgumentError for a schedule that metrics decide.
    """
    name = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if name in STEERED:
        expected = f"to be left out with lr_scheduler_type={name!r}, which metrics decide"
        why = "Bands are compared by rates that are known beforehand; a number trains with any."
        raise invalid(BANDS, args.bands, expected, why, UnsupportedArgumentError)
    found, momentum = rates(args, name, steps), momentum_of(args)
    for step in reversed(range(steps - 1)):
        found[step] += momentum * found[step + 1]
    return found


def rates(args: Any, name: str, steps: int) -> list[float]:
    """Return the rate of each step, in units of the learning rate, by the schedule that Trainer
    makes of these arguments."""
    warmup = args.warmup_steps or 0
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    schedule = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=int(warmup) if warmup >= 1 else math.ceil(steps * warmup),
        num_training_steps=steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
    found = []
    for _ in range(steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return found


def momentum_of(args: Any) -> float:
    """Return how much of a step's update is in the next one: beta1 of Adam and its kin, or what
    ``optim_args`` says; 0 for other optimizers."""
    words = (args.optim_args or "").replace(" ", "").split(",")
    given = dict(word.partition("=")[::2] for word in words)
    if "momentum" in given:
        return float(given["momentum"])
    name = str(getattr(args.optim, "value", args.optim))
    return float(args.adam_beta1) if "adam" in name else 0.0
