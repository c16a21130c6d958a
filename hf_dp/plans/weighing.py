"""Over how many steps to correlate noise: what each choice leaves in the weights of a run.

The weights at the end add up the steps, each as much as its learning rate and the momentum of later
ones say. So they are compared by the noise in that sum, at the same epsilon. The column of
:func:`hf_dp.plans.bands.square_root_column` is taken as it is: one that is optimized for the last
weights has 0.86 of its noise there and 6 times of it in each step (8 bands, 198 steps, linear
decay, Adam); one for all prefix sums 0.94 there, and 1.4 times of it in a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hf_dp.errors import InvalidArgumentError, UnsupportedArgumentError
from hf_dp.plans.bands import noise_of_prefixes, noise_of_steps, noise_of_sum, square_root_column
from hf_dp.plans.privacy import PrivacyPlan

# What "auto" chooses among: the error is flat around its least, each band more keeps as much memory
# as the numbers that train, and each choice is a calibration.
CHOICES = (2, 4, 8, 16)


@dataclass(frozen=True)
class Weighed:
    """A number of bands (1: independent noise), and standard deviations of noise in units of what
    independent noise has for the same target.

    Args:
        weights: of the weights after the last step, as the run's schedule adds steps up.
        sums: of the sums of the first 1 .. T steps, the root of their mean square.
        step: of one step, likewise.
        resumed: of the weights, where the run is resumed once, after half of its steps.
    """

    bands: int
    plan: PrivacyPlan
    weights: float
    sums: float
    step: float
    resumed: float


def weigh(
    plan_with: Callable[[int | None], PrivacyPlan],
    workload: Callable[[int], Sequence[float]],
    choices: Sequence[int] = CHOICES,
) -> list[Weighed]:
    """Return independent noise, and each choice that the run has room for.

    Args:
        plan_with: returns the plan with so many bands, calibrated to the target.
        workload: returns what of a step's gradient is in the weights at the end, for each of so
            many steps, up to a factor.

    Raises: InvalidArgumentError where the only choice does not fit.
    """
    plain = plan_with(None)
    weights, plans = workload(plain.steps), {1: plain}
    for bands in choices:
        try:
            plans[bands] = plan_with(bands)
        except InvalidArgumentError as error:
            if len(choices) == 1 or isinstance(error, UnsupportedArgumentError):
                raise
    half = plain.steps // 2

    def norm(values: Sequence[float] | np.ndarray) -> float:
        return float(np.linalg.norm(values))

    def weighed(bands: int) -> Weighed:
        plan, column = plans[bands], square_root_column(bands)
        sigma, steps = plan.noise_multiplier / plain.noise_multiplier, plan.steps
        whole = norm(weights)
        parts = noise_of_sum(column, weights[:half]), noise_of_sum(column, weights[half:])
        return Weighed(
            bands,
            plan,
            sigma * noise_of_sum(column, weights) / whole,
            sigma * norm(noise_of_prefixes(column, steps)) / norm(noise_of_prefixes((1.0,), steps)),
            sigma * norm(noise_of_steps(column, steps)) / math.sqrt(steps),
            sigma * math.hypot(*parts) / whole,
        )

    return [weighed(bands) for bands in plans]


def best(found: Sequence[Weighed]) -> Weighed:
    """Return the one that leaves the least noise in the weights."""
    return min(found, key=lambda one: one.weights)
