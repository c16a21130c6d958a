"""The division of the budget, against the accountants on the heterogeneous composition."""

from __future__ import annotations

import pytest

from hf_dp.accounting import PoissonSampledGaussian, epsilon
from hf_dp.accounting.budget import compute_sigma
from hf_dp.errors import CalibrationError, InvalidArgumentError

DELTA = 1 / (2 * 67_349)
SST2 = {
    "sample_rate": 1024 / 67_349,
    "steps": 198,
    "selection_sample_rate": 0.02,
    "selection_iterations": 5,
}


@pytest.mark.parametrize(
    ("accountant", "target"), [("rdp", 0.5), ("rdp", 2.0), ("rdp", 8.0), ("pld", 2.0)]
)
def test_everything_together_just_meets_the_target(target, accountant):
    training, selection = compute_sigma(target, DELTA, accountant=accountant, **SST2)
    steps = PoissonSampledGaussian(training, SST2["sample_rate"], 198)
    draws = PoissonSampledGaussian(selection, 0.02, 5)
    assert epsilon(steps, DELTA, accountant).value == pytest.approx(0.9 * target, rel=2e-4)
    assert epsilon([steps, draws], DELTA, accountant).value <= target
    less = PoissonSampledGaussian(selection * 0.999, 0.02, 5)
    assert epsilon([steps, less], DELTA, accountant).value > target


def test_a_selection_that_does_not_fit_says_what_to_change():
    whole = SST2 | {"selection_sample_rate": 1.0, "selection_iterations": 10**7}
    with pytest.raises(
        CalibrationError, match="does not fit beside the training.*selection_budget_ratio"
    ):
        compute_sigma(0.05, 1e-9, accountant="rdp", **whole)
    for ratio in (0.0, 1.0, -0.1):
        with pytest.raises(InvalidArgumentError, match="selection_budget_ratio"):
            compute_sigma(1.0, DELTA, selection_budget_ratio=ratio, **SST2)
