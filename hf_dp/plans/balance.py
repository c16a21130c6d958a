"""Balanced experts: each example's loss asks its routers for balance, by noised loads.

The load-balancing loss of a mixture of experts (Fedus et al. 2022, arXiv 2101.03961, equation 4)
multiplies, for each layer and expert e, the share f_e of a batch's tokens that were sent to e with
their mean probability P_e. The batch's own f would couple its examples. Here it is an estimate from
the releases of earlier steps.

**The loads.** An example has T tokens, and each of L layers sends h_e T of them to expert e, k
experts a token. It adds ``v = (h - k / E) / sqrt(k (1 - k / E) L)``, (L, E), to a second sum over
the draw. Since 0 <= h_e <= 1 and sum_e h_e = k, the squares of a layer's ``h - k / E`` add up to at
most ``k - k^2 / E``, so |v| <= 1; it is clipped to 1 all the same. The sum is noised as a part of
the step's event (:class:`hf_dp.accounting.event.NoisedSum`).

**The loss.** To an example's loss is added, before its gradient is clipped,
``coefficient E / L sum_{layers, e} (f_e - k / E) P_e``, with P_e the mean over the example's own
tokens. So it is a function of this example and of what was released before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hf_dp import _validate
from hf_dp.plans.mechanism import Words

LOADS = "loads"  # the part of a step's event

# The arguments.
COEFFICIENT, RATIO = "router_balance", "router_balance_budget_ratio"
BUDGET_RATIO = 0.02


def check_coefficient(name: str, value: object) -> float:
    """Return the weight of the load-balancing loss, above 0. Raises: InvalidArgumentError."""
    return _validate.positive(name, value, "transformers' router_aux_loss_coef is 0.001 to 0.02.")


def check_ratio(name: str, value: object) -> float:
    """Return the loads' part of the budget, in (0, 1). Raises: InvalidArgumentError."""
    return _validate.in_unit_interval(name, value, f"{BUDGET_RATIO} is enough for large batches.")


@dataclass(frozen=True)
class RouterBalance:
    """Noised loads of experts, and the loss that they make.

    Args:
        coefficient: > 0, of the load-balancing loss.
        budget_ratio: in (0, 1): the loads' part of 1 / noise_multiplier^2, gradients included.

    Raises: InvalidArgumentError.
    """

    coefficient: float
    budget_ratio: float = BUDGET_RATIO

    def __post_init__(self) -> None:
        check_coefficient(COEFFICIENT, self.coefficient)
        check_ratio(RATIO, self.budget_ratio)

    @property
    def sensitivities(self) -> dict[str, float]:
        """The norm of what one example adds to the loads, at the most."""
        return {LOADS: 1.0}

    def part(self, noise_multiplier: float) -> Mapping[str, float]:
        """Return the noise multiplier of the loads beside this one of the gradients."""
        return {LOADS: noise_multiplier * math.sqrt((1 - self.budget_ratio) / self.budget_ratio)}

    def outline(self, noise_multiplier: float, joint: float) -> str:
        """Return its numbers, on one line. Args: joint: that of all of a step's sums, as of one."""
        return (
            f"balanced experts: noised loads with noise multiplier "
            f"{self.part(noise_multiplier)[LOADS]:.6g}; all sums of a step, as one with noise "
            f"multiplier {joint:.6g}"
        )

    def words(self, others: Words, noise_multiplier: float, joint: float) -> Words:
        """Return how a statement speaks of it. Args: others: how it does of the other sums."""
        also = others.also_covered or "and whatever is computed from them"
        return replace(
            others,
            name=f"{others.name} and noised loads of experts",
            mechanism=(
                f"{others.mechanism}. What share of its tokens each example of the draw sends to "
                "each expert, less the mean and divided so that its norm is at most 1, is summed, "
                "too; Gaussian noise with standard deviation "
                f"{self.part(noise_multiplier)[LOADS]:.6g} is added once to each number of that "
                "sum. Averages of it enter each example's loss with the weight "
                f"{self.coefficient!r}, before gradients are clipped, and ask its routers for "
                "balance. All sums of a step are accounted together, as one with noise multiplier "
                f"{joint:.6g}"
            ),
            proof=f"{others.proof}, each with bounded loads and noise on them",
            also_covered=f"the loads by which experts are balanced, {also}",
        )
