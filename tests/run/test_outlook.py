"""Warnings before the first step: of settings known to fail, and of none known to work."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import tiny

from hf_dp.cli.answers import table
from hf_dp.planning import most_signal
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.run.outlook import doubts


def plan(**options):
    options = {
        "num_examples": 67_349,
        "expected_batch_size": 1024,
        "num_train_epochs": 3,
        "target_epsilon": 3,
        "clipping_norm": 0.1,
        "accountant": "rdp",
        **options,
    }
    return PrivacyPlan.create(**options)


def said(made, parameters=22_000_000, learning_rate=1e-3, optimizer="adamw_torch_fused"):
    return list(
        doubts(made, parameters=parameters, learning_rate=learning_rate, optimizer=optimizer)
    )


def test_the_recipes_that_work_get_no_warning():
    assert said(plan()) == []
    # E2E with GPT-2, Li et al., table 2
    e2e = plan(num_examples=42_061, num_train_epochs=10, target_epsilon=8)
    assert said(e2e, parameters=124_000_000) == []


@pytest.mark.parametrize(
    ("optimizer", "rate", "warned"),
    [
        ("adamw_torch_fused", 5e-5, True),
        ("adamw_torch", 1e-5, True),
        ("adamw_torch", 5e-4, False),
        ("sgd", 5e-5, False),
    ],
)
def test_transformers_default_rate_under_adam(optimizer, rate, warned):
    found = said(plan(), learning_rate=rate, optimizer=optimizer)
    assert [each.startswith("learning_rate is") for each in found] == [True] * warned


def test_noise_that_drowns_the_gradients():
    few = plan(num_examples=300, expected_batch_size=32, target_delta=1e-3)
    (found,) = said(few)
    assert "drown" in found and "22,000,000 numbers train" in found
    assert said(few, parameters=400) == []  # a head alone
    # It falls with the root of the numbers that train, and does not depend on the clipping norm.
    assert most_signal(few, 400) == pytest.approx(100 * most_signal(few, 4_000_000))
    assert most_signal(plan(clipping_norm=1.0), 10) == pytest.approx(most_signal(plan(), 10))


def test_a_large_delta():
    assert said(plan(target_delta=1 / (2 * 67_349))) == []
    (found,) = said(plan(target_delta=1.2e-5))
    assert "above 1/(2N) = 7.42e-06" in found


@pytest.mark.parametrize(("delta", "warned"), [(1e-3, False), (1.01e-3, True), (2e-3, True)])
def test_a_delta_that_protects_nobody(delta, warned):
    """Where it is the default of few rows, too, and for DP-FP."""
    made = plan(num_examples=400, expected_batch_size=40, target_delta=delta)
    assert any("above 0.001" in each for each in said(made, parameters=100)) == warned
    assert ("above 0.001" in table([], delta)) == warned  # `hf-dp account` and `hf-dp plan`
    default = plan(num_examples=400, expected_batch_size=40)
    assert any("delta is 0.00125, above 0.001" in each for each in said(default, parameters=100))
    forward = SimpleNamespace(delta=delta, num_examples=400, mechanism=None)
    assert any("above 0.001" in each for each in said(forward)) == warned


def test_the_trainer_says_so_once(tmp_path, caplog):
    options = {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 2}
    made = tiny.trainer(tmp_path, learning_rate=5e-5, **options)
    with caplog.at_level(logging.WARNING, "hf_dp"):
        made.train()
    assert sum("learning_rate is 5e-05" in message for message in caplog.messages) == 1
    caplog.clear()
    again = tiny.trainer(tmp_path, learning_rate=5e-5, **options)
    with caplog.at_level(logging.WARNING, "hf_dp"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert not any("learning_rate" in message for message in caplog.messages)
