"""Over how many steps to correlate noise: what each choice leaves in the weights of a run.

The weights at the end add up the steps, each as much as its learning rate and the momentum of later
ones say: that sum's noise, at the same epsilon, is compared. The column is taken as it is: one that
is optimized for the last weights has 0.86 of its noise there and 6 times of it in each step (8
bands, 198 steps, linear decay, Adam); one for all prefix sums 0.94 there, and 1.4 times in a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_dp._validate import invalid
from hf_dp.errors import InvalidArgumentError, UnsupportedArgumentError
from hf_dp.plans import bands as banded
from hf_dp.plans.privacy import PrivacyPlan

# What "auto" chooses among: the error is flat around its least, each band more keeps as much memory
# as the numbers that train, and each choice is a calibration.
CHOICES = (2, 4, 8, 16)


@dataclass(frozen=True)
class Weighed:
    """A number of bands (1: independent noise), and standard deviations of noise in units of what
    independent noise has for the same target."""

    bands: int
    plan: PrivacyPlan
    weights: float  # of those after the last step, as the run's schedule adds steps up
    sums: float  # of the first 1 .. T steps, the root of their mean square
    step: float  # of one step, likewise
    resumed: float  # of the weights, where the run is resumed once, after half of its steps


def weigh(
    plan_with: Callable[[int | None], PrivacyPlan],
    workload: Callable[[int], Sequence[float]],
    choices: Sequence[int] = CHOICES,
) -> list[Weighed]:
    """Return independent noise, and each choice that the run has room for, by plans that meet the
    target and :func:`workload_of`. Raises: InvalidArgumentError if the only choice does not fit."""
    plans = {1: plan_with(None)}
    weights = workload(steps := plans[1].steps)
    for bands in choices:
        try:
            plans[bands] = plan_with(bands)
        except InvalidArgumentError as error:
            if len(choices) == 1 or isinstance(error, UnsupportedArgumentError):
                raise

    def noise(bands: int) -> np.ndarray:
        column, half = banded.square_root_column(bands), steps // 2
        halves = [banded.noise_of_sum(column, part) for part in (weights[:half], weights[half:])]
        of_sums = np.cumsum(banded.solved(column, np.ones(steps)) ** 2) ** 0.5
        each = of_sums, banded.noise_of_steps(column, steps), np.array(halves)
        every = [banded.noise_of_sum(column, weights), *(np.linalg.norm(one) for one in each)]
        return plans[bands].noise_multiplier * np.array(every)

    ratios = {bands: (noise(bands) / noise(1)).tolist() for bands in plans}
    return [Weighed(bands, plan, *ratios[bands]) for bands, plan in plans.items()]


def workload_of(args: Any, steps: int) -> list[float]:
    """Return, for so many steps T, how much of each step's gradient is in the weights after the
    last, up to a factor: ``sum_{t >= s} rate_t m^(t - s)``, m the momentum that ``optim_args`` has,
    or Adam's beta1, or 0. (Adam divides by a second moment, which under noise hardly changes.)

    Raises: UnsupportedArgumentError for a schedule that metrics decide.
    """
    import torch
    from transformers import get_scheduler

    name = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if name in ("reduce_lr_on_plateau", "greedy"):
        expected = f"to be left out with lr_scheduler_type={name!r}, which metrics decide"
        why = "Bands are compared for rates that are known beforehand. Give a number of bands."
        raise invalid(banded.BANDS, args.bands, expected, why, UnsupportedArgumentError)
    warmup = args.warmup_steps or 0
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    schedule = get_scheduler(  # as Trainer makes it
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
    words = (args.optim_args or "").replace(" ", "").split(",")
    given = dict(word.partition("=")[::2] for word in words)
    optim = str(getattr(args.optim, "value", args.optim))
    momentum = float(given.get("momentum", args.adam_beta1 if "adam" in optim else 0.0))
    for step in reversed(range(steps - 1)):
        found[step] += momentum * found[step + 1]
    return found
