"""Suggested settings: what the papers' rules give, and what a user can ask for."""

import math

import pytest

from hf_dp.errors import InvalidArgumentError
from hf_dp.planning import LEAST_SIGNAL, most_signal
from hf_dp.planning import suggest as suggest_by_pld
from hf_dp.plans.units import Users

MINILM = 22_713_986


def suggest(*given, **options):
    """By RDP, which takes milliseconds."""
    return suggest_by_pld(*given, **{"accountant": "rdp", **options})


def test_sst2_gives_the_settings_of_the_paper():
    found = suggest(67_349, 3, parameters=MINILM)
    assert found.settings["expected_batch_size"] == 1024
    assert found.settings["max_steps"] == found.plan.steps == 198
    assert found.settings["per_example_max_grad_norm"] == found.plan.clipping_norm == 0.1
    assert found.settings["peft"] is None and found.parameters == MINILM
    assert found.plan.noise_multiplier == pytest.approx(0.8254, abs=1e-4)
    assert all(choice.reason for choice in found.choices)


def test_sample_rate_and_steps_carry_over_to_more_data():
    """QQP: Li et al., appendix L."""
    found = suggest(363_846, 3)
    assert found.plan.sample_rate == pytest.approx(1024 / 67_349, rel=1e-3)
    assert found.plan.steps == 198


def test_few_examples_get_a_larger_share_in_each_step():
    assert suggest(18_000, 3).settings["expected_batch_size"] == 512
    assert suggest(1_000, 8).settings["expected_batch_size"] == 125


@pytest.mark.parametrize("epochs", [0.1, 0.5, 1, 2])
def test_fewer_epochs_than_wanted_are_kept_to(epochs):
    found = suggest(67_349, 3, epochs=epochs)
    batch, steps = found.settings["expected_batch_size"], found.settings["max_steps"]
    assert batch * steps / 67_349 == pytest.approx(epochs, rel=0.02)
    # Both shrink by the same factor.
    assert batch / 1024 == pytest.approx(steps / 198, rel=0.05)


def test_more_epochs_than_wanted_go_into_the_batch():
    found = suggest(67_349, 3, epochs=12)
    assert found.settings["max_steps"] == 198
    assert found.settings["expected_batch_size"] == pytest.approx(4 * 1024, rel=0.01)
    assert suggest(1_000, 3, epochs=1e6).settings["expected_batch_size"] == 1_000


def test_few_steps_get_a_larger_learning_rate():
    rates = [suggest(67_349, 3, epochs=epochs).settings["learning_rate"] for epochs in (0.1, 1, 3)]
    assert rates == sorted(rates, reverse=True) and rates[0] > rates[-1]


@pytest.mark.parametrize(("peft_type", "rate"), [("rgp", 1e-3), ("lora", 7e-3), ("IA3", 7e-3)])
def test_an_adapter_gets_a_larger_learning_rate_than_a_models_own_matrices(peft_type, rate):
    found = suggest(67_349, 3, peft={"peft_type": peft_type}).settings["learning_rate"]
    assert found == rate


def test_what_trains_follows_from_the_noise():
    """Where the noise drowns all weights, an adapter trains, with a larger learning rate."""
    few, peft = {"num_examples": 300, "target_epsilon": 1}, {"peft_type": "lora", "r": 8}
    found = suggest(**few, parameters=MINILM)
    assert found.settings["peft"] == peft and found.parameters is None
    assert found.settings["learning_rate"] > suggest(**few).settings["learning_rate"]
    # The choice is made at a ratio that the plan and the size of the model fix.
    enough = math.floor(most_signal(found.plan, 1) ** 2 / LEAST_SIGNAL**2)
    assert suggest(**few, parameters=enough).settings["peft"] is None
    assert suggest(**few, parameters=enough + 1).settings["peft"] == peft
    # A choice of the user's stays.
    chosen = {"peft_type": "lora", "r": 2}
    assert suggest(**few, parameters=MINILM, peft=chosen).settings["peft"] == chosen


def test_rows_of_users_that_are_drawn_count():
    users = Users(column="who", max_rows=2, sampling="examples", reduction="sum", num_rows=67_349)
    found = suggest_by_pld(40_000, 1, users=users, privacy_unit="user")
    assert found.plan.sample_rate == pytest.approx(1024 / 67_349, rel=1e-3)


def test_a_private_selection_is_calibrated_as_a_whole():
    plain = suggest(67_349, 3)
    searched = suggest(67_349, 3, mean_runs=5)
    assert searched.plan.noise_multiplier > 1.1 * plain.plan.noise_multiplier


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"num_examples": 3}, "num_examples"),
        ({"target_epsilon": 0}, "target_epsilon"),
        ({"epochs": 0}, "epochs"),
        ({"epochs": float("nan")}, "epochs"),
        ({"parameters": 0}, "parameters"),
        ({"target_delta": 2}, "target_delta"),
    ],
)
def test_bad_input_is_named(wrong, named):
    with pytest.raises(InvalidArgumentError, match=f"`{named}`"):
        suggest(**{"num_examples": 1000, "target_epsilon": 3, **wrong})
