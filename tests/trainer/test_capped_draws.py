"""Draws with a largest size: sampler, noise, ledger and statement tell the same story."""

import dataclasses
import json

import pytest
import tiny
from watch import watch

from hf_dp.accounting import PoissonSampledGaussian, TruncatedPoissonSampledGaussian, epsilon
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.plans.samplers import PoissonSampler
from hf_dp.run.ledger import RunLedger


@pytest.mark.slow
def test_what_ran_is_what_is_accounted(tmp_path, monkeypatch):
    drawn = watch(monkeypatch, PoissonSampler, "draw")
    trainer = tiny.trained(tiny.trainer(tmp_path, max_logical_batch_size=9, max_steps=6))
    assert len(drawn) >= 6
    assert max(map(len, drawn)) <= 9
    event = TruncatedPoissonSampledGaussian(1.0, 8 / 40, 6, 40, 9)
    assert trainer.ledger.events == (event,)
    statement = trainer.privacy_statement()
    assert statement.epsilon == epsilon(event, 1 / 80).rounded_up(3)
    assert statement.epsilon > epsilon(PoissonSampledGaussian(1.0, 0.2, 6), 1 / 80).rounded_up(3)
    assert "of a draw of more than 9 rows" in statement.plan.words.sampling
    assert "with truncated Poisson sampling" in statement.sentence()
    trainer.save_model()
    written = json.loads((tmp_path / "privacy.json").read_text())
    draw = {"name": "truncated_poisson", "max_batch_size": 9}
    assert written["plan"]["mechanism"]["draw"] == draw
    assert written["ledger"][0]["type"] == "TruncatedPoissonSampledGaussian"


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
