"""Divide a privacy budget between selection and training.

DP-FROST, section 4.6, Algorithms 2 and 3.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_dp._validate import in_unit_interval, integer
from hf_dp.accounting.calibration import MakeEvent, calibrate_noise_multiplier
from hf_dp.accounting.event import Event
from hf_dp.accounting.events import PoissonSampledGaussian
from hf_dp.errors import CalibrationError


def compute_sigma(
    target_epsilon: float,
    delta: float,
    *,
    sample_rate: float,
    steps: int,
    selection_sample_rate: float,
    selection_iterations: int,
    selection_budget_ratio: float = 0.1,
    accountant: str = "pld",
    prior_events: Sequence[Event] = (),
    event: MakeEvent | None = None,
) -> tuple[float, float]:
    """Return the noise multipliers (of training, of selection).

    The noise of training is first calibrated to ``(1 - selection_budget_ratio) * target_epsilon``,
    together with what ran before. The noise of the selection is then the smallest with which
    everything together stays within ``target_epsilon``. Epsilons do not add up, so the selection
    gets more than its ratio.

    Args:
        sample_rate, steps: of training.
        selection_sample_rate: q_ps.
        selection_iterations: T, times the number of selections.
        selection_budget_ratio: 1 - r_eps, in (0, 1).
        event: of training, as in :func:`hf_dp.accounting.calibrate_noise_multiplier`.

    Raises:
        InvalidArgumentError: an argument is out of range.
        CalibrationError: the selection does not fit; the message names what to change.
    """
    ratio = in_unit_interval("selection_budget_ratio", selection_budget_ratio)
    iterations = integer("selection_iterations", selection_iterations, 1)
    training = calibrate_noise_multiplier(
        (1 - ratio) * target_epsilon, delta, sample_rate, steps, accountant, prior_events, event
    )
    make = event or (lambda noise, count: PoissonSampledGaussian(noise, sample_rate, count))
    spent = (*prior_events, make(training, steps))
    try:
        selection = calibrate_noise_multiplier(
            target_epsilon, delta, selection_sample_rate, iterations, accountant, spent
        )
    except CalibrationError as problem:
        raise CalibrationError(
            f"The selection does not fit beside the training: {problem} Raise "
            f"`selection_budget_ratio` (now {ratio:g}), or lower `selection_sample_rate` or "
            "`selection_iterations`."
        ) from problem
    return training, selection
