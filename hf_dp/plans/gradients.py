"""From the numbers of DP-SGD to the plan that has them all."""

from __future__ import annotations

from hf_dp import _validate
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.plans.allocation import AllocatedPlan
from hf_dp.plans.best_of_runs import BestOfRunsPlan, not_in_a_search
from hf_dp.plans.dp_sgd import DpSgdPlan
from hf_dp.plans.noised_loss import BOUND, RATIO, NoisedLossPlan, half_given
from hf_dp.plans.sampling import POISSON, RANDOM_ALLOCATION, SAMPLINGS


def dp_sgd_plan(
    clipping_norm: float,
    noise_multiplier: float | None = None,
    clipping: str = "flat",
    max_batch_size: int | None = None,
    noised_loss_bound: float | None = None,
    noised_loss_budget_ratio: float | None = None,
    sampling: str = POISSON,
    mean_runs: float | None = None,
) -> DpSgdPlan:
    """Return the plan of DP-SGD, with a noised loss if its two arguments are given.

    Args:
        sampling: one of :data:`hf_dp.plans.sampling.SAMPLINGS`.
        mean_runs: the expected number of runs of a private selection; None: this is no search.

    Raises: InvalidArgumentError.
    """
    _validate.one_of("sampling", sampling, SAMPLINGS)
    numbers = (clipping_norm, noise_multiplier, clipping, max_batch_size)
    if mean_runs is not None:
        others = {
            "sampling": None if sampling == POISSON else sampling,
            BOUND: noised_loss_bound,
            RATIO: noised_loss_budget_ratio,
        }
        for name, value in others.items():
            if value is not None:
                raise not_in_a_search(name, value)
        return BestOfRunsPlan(*numbers, mean_runs=mean_runs)
    if noised_loss_bound is None and noised_loss_budget_ratio is None:
        return (AllocatedPlan if sampling == RANDOM_ALLOCATION else DpSgdPlan)(*numbers)
    if sampling != POISSON:
        raise _validate.invalid(
            "sampling",
            sampling,
            f"to be {POISSON!r} with a noised loss",
            "No bound is implemented for both.",
            UnsupportedArgumentError,
        )
    if noised_loss_bound is None:
        raise half_given(BOUND, RATIO)
    if noised_loss_budget_ratio is None:
        raise half_given(RATIO, BOUND)
    return NoisedLossPlan(
        *numbers,
        noised_loss_bound=noised_loss_bound,
        noised_loss_budget_ratio=noised_loss_budget_ratio,
    )
