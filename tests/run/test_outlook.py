"""Warnings before the first step: of settings known to fail, and of none known to work."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
from pages import ROOT

from hf_dp.cli.answers import table
from hf_dp.planning import LEAST_SIGNAL, most_signal
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.run import outlook
from hf_dp.run.outlook import doubts
from hf_dp.statement.record import read


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


# What learned, and what stayed at chance: numbers that train, and the plan.
SMOLLM2 = {"expected_batch_size": 256, "max_steps": 20, "accountant": "pld"}
QUICKSTART = {"num_examples": 8000, "expected_batch_size": 256, "num_train_epochs": 0.5}


def test_no_card_of_a_run_that_learned_is_warned():
    """The lowest is that of 1.8 million numbers on CIFAR-10 at epsilon 0.5, at 0.59."""
    ratios = {}
    for file in sorted(ROOT.glob("model_cards/*/*/privacy.json")):
        record = read(file.parent)
        trained = re.search(r"What was trained \| (?:all )?([\d,]+)", card_of(file))
        assert trained is not None, file
        ratios[str(file)] = most_signal(record.plan, int(trained[1].replace(",", "")))
    assert len(ratios) >= 30
    assert min(ratios.values()) > 1.5 * LEAST_SIGNAL, ratios


def card_of(file: Path) -> str:
    return (file.parent / "README.md").read_text()


def test_an_adapter_of_a_decoder_and_the_quickstart_learned_and_are_not_warned():
    assert said(plan(**SMOLLM2), parameters=921_600) == []  # 82.8 % on SST-2
    assert most_signal(plan(**SMOLLM2), 921_600) == pytest.approx(2.3, rel=0.01)
    assert said(plan(**QUICKSTART, target_epsilon=8), learning_rate=2e-3) == []


@pytest.mark.parametrize("ratio", [0.06, 0.19, 0.29, 0.5])
def test_runs_that_stayed_at_chance_are_warned_and_one_that_learned_is_not(ratio):
    """At these ratios; the one at 0.5 reached 82 %."""
    made = plan(num_examples=300, expected_batch_size=32)
    numbers = round((most_signal(made, 1) / ratio) ** 2)
    assert [f"{ratio:.2g} of the noise" in each for each in said(made, parameters=numbers)] == (
        [True] if ratio < 0.5 else []
    )


def test_planted_limit_of_before_lets_runs_at_chance_pass(monkeypatch):
    monkeypatch.setattr(outlook, "LEAST_SIGNAL", 0.1)
    made = plan(num_examples=300, expected_batch_size=32)
    assert said(made, parameters=round((most_signal(made, 1) / 0.29) ** 2)) == []
