"""Draws with a largest size: steps beyond the plan. (What such a run states: tests/streams, of rows
that are read; tests/distributed, of several processes.)"""

import dataclasses

from hf_dp.accounting import PoissonSampledGaussian, epsilon
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.run.ledger import RunLedger


def test_steps_beyond_the_plan_are_paid_for_as_capped_draws(tmp_path):
    """More steps than were planned stop where *these* draws meet the target."""
    plan = PrivacyPlan.create(
        num_examples=40, expected_batch_size=8, clipping_norm=0.1, noise_multiplier=4.0, max_steps=3,
        max_batch_size=8,
    )  # fmt: skip
    plan = dataclasses.replace(plan, target_epsilon=epsilon(plan.event(), plan.delta).value + 1e-3)
    assert RunLedger(tmp_path, plan).budget.allowed_steps(10) == 3
    # As plain Poisson draws more would have seemed to fit.
    assert epsilon(PoissonSampledGaussian(4.0, 0.2, 4), plan.delta).value < plan.target_epsilon
