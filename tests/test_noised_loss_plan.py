"""The plan of a noised loss: its noise inside the target, its exact sum, its words."""

from __future__ import annotations

import json
import math

import pytest

from hf_dp.accounting import (
    Gaussian,
    LedgerEntry,
    PoissonSampledGaussian,
    TruncatedPoissonSampledGaussian,
    epsilon,
)
from hf_dp.errors import ConfigError, InvalidArgumentError
from hf_dp.plans import NoisedLoss, PrivacyPlan, SelectionPlan

GIVEN = {
    "num_examples": 1000,
    "expected_batch_size": 50,
    "clipping_norm": 0.1,
    "num_train_epochs": 2.0,
    "accountant": "rdp",
}
LOSS = {"noised_loss_bound": 3.0, "noised_loss_budget_ratio": 0.1}


def create(**changes: object) -> PrivacyPlan:
    return PrivacyPlan.create(**{**GIVEN, **LOSS, **changes})


# -- the noise --


@pytest.mark.parametrize("ratio", [0.001, 0.1, 0.9])
def test_everything_together_meets_the_target_and_is_divided_by_the_ratio(ratio):
    plan = create(target_epsilon=3.0, noised_loss_budget_ratio=ratio)
    event = plan.event()
    assert (
        isinstance(event, PoissonSampledGaussian)
        and event.noise_multiplier == plan.noise_multiplier
    )
    assert 2.99 < epsilon(plan.events(), plan.delta, "rdp").value <= 3.0
    joint = event.joint_noise_multiplier
    assert event.noise_multiplier**-2 == pytest.approx((1 - ratio) * joint**-2, rel=1e-12)
    assert event.noise_multipliers["loss"] ** -2 == pytest.approx(ratio * joint**-2, rel=1e-12)
    alone = PrivacyPlan.create(**GIVEN, target_epsilon=3.0)
    assert joint == pytest.approx(alone.noise_multiplier, rel=1e-3)


def test_the_target_also_pays_for_a_selection_and_for_earlier_runs():
    selection = SelectionPlan("gradient", 0.1, 4, 0.1, 2, None, 0.1)
    prior = [Gaussian(5.0)]
    plan = create(target_epsilon=3.0, selection=selection, prior_events=prior)
    assert [type(event).__name__ for event in plan.events()] == [
        "PoissonSampledGaussian",
        "PoissonSampledGaussian",
    ]
    assert 2.99 < epsilon([*prior, *plan.events()], plan.delta, "rdp").value <= 3.0


def test_planted_calibration_of_the_gradients_alone_is_seen():
    alone = PrivacyPlan.create(**GIVEN, target_epsilon=3.0)
    plan = create(noise_multiplier=alone.noise_multiplier)
    assert epsilon(plan.events(), plan.delta, "rdp").value > 3.05


def test_noise_that_is_given_is_that_of_the_gradients():
    plan = create(noise_multiplier=1.5)
    assert plan.event(3) == PoissonSampledGaussian(
        1.5, 0.05, 3, beside={"loss": 1.5 * math.sqrt(9)}
    )
    assert plan.mechanism.loss.std(plan, plan.noise_multiplier) == pytest.approx(4.5 * 3.0 / 50)
    without = PrivacyPlan.create(**GIVEN, noise_multiplier=1.5)
    assert plan.noise_std == without.noise_std
    assert (
        epsilon(plan.event(), 1e-5, "rdp").value
        > 1.02 * epsilon(without.event(), 1e-5, "rdp").value
    )


def test_the_figures_on_the_page():
    sst2 = {"num_examples": 67349, "expected_batch_size": 1024, "num_train_epochs": 3.0}
    alone = PrivacyPlan.create(**{**GIVEN, **sst2}, target_epsilon=3.0)
    plan = create(**sst2, target_epsilon=3.0, noised_loss_bound=1.5, noised_loss_budget_ratio=0.01)
    sigmas = [round(each.noise_multiplier, 4) for each in (alone, plan)]
    assert sigmas == [0.8254, 0.8296]
    assert round(plan.mechanism.loss.std(plan, plan.noise_multiplier), 3) == 0.012


def test_a_limit_of_the_draw():
    plan = create(noise_multiplier=1.5, max_batch_size=60, accountant="pld")
    assert plan.event() == TruncatedPoissonSampledGaussian(
        1.5, 0.05, 40, 1000, 60, beside={"loss": 4.5}
    )


def test_the_release_of_a_step():
    planned = create(noise_multiplier=1.5).step_release()
    assert planned.noise_std("loss") == pytest.approx(4.5 * 3.0)
    assert planned.sensitivities["loss"] == 3.0
    assert planned.noise_std("sum") == create(noise_multiplier=1.5).noise_std


# -- the exact sum --


@pytest.mark.parametrize("bound", [3.0, 0.1, 1e-30, 1e30, 2.0**10, math.nextafter(4.0, 0)])
@pytest.mark.parametrize("rows", [2, 1000, 2**20, 2**20 - 1, 10**9])
def test_a_sum_of_all_losses_is_exact_in_float64(bound, rows):
    plan = create(noise_multiplier=1.0, num_examples=rows, expected_batch_size=2, max_steps=1)
    unit = NoisedLoss(bound, 0.1).unit(plan)
    assert math.frexp(unit)[0] == 0.5  # a power of two
    each = math.floor(bound / unit)
    assert rows * each <= 2**53  # as whole numbers
    assert unit <= bound * 2.0**-20  # what is rounded off does not matter


# -- as data --


def test_a_plan_without_it_is_as_it_was():
    mechanism = PrivacyPlan.create(**GIVEN, noise_multiplier=1.5).to_dict()["mechanism"]
    assert mechanism == {
        "name": "dp_sgd",
        "clipping_norm": 0.1,
        "noise_multiplier": 1.5,
        "clipping": "flat",
        "draw": {"name": "poisson"},
        "loss": None,
        "search": None,
    }


def test_it_is_read_back_and_nothing_is_guessed():
    plan = create(noise_multiplier=1.5)
    written = json.loads(json.dumps(plan.to_dict()))
    assert written["mechanism"]["loss"] == {"bound": 3.0, "budget_ratio": 0.1}
    assert PrivacyPlan.from_dict(written) == plan
    assert plan.makes(LedgerEntry(plan.event(4), "training"))
    assert not plan.makes(
        LedgerEntry(PoissonSampledGaussian(1.5, 0.05, 4, beside={"loss": 5.0}), "training")
    )
    del written["mechanism"]["loss"]["bound"]
    with pytest.raises(ConfigError, match="bound"):
        PrivacyPlan.from_dict(written)
    del written["mechanism"]["loss"]
    with pytest.raises(ConfigError, match="loss"):
        PrivacyPlan.from_dict(written)


def test_the_words_say_what_is_released_and_that_it_is_covered():
    words = create(noise_multiplier=1.5).words
    assert "each clipped to [0, 3.0], are summed, too" in words.mechanism
    assert "standard deviation 4.5 x 3.0 is added once" in words.mechanism
    assert f"as one with noise multiplier {1.5 * math.sqrt(0.9):.6g}" in words.mechanism
    assert words.also_covered.startswith("the noised losses")
    assert PrivacyPlan.create(**GIVEN, noise_multiplier=1.5).words.also_covered == ""


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"noised_loss_bound": None}, "`noised_loss_bound` to be given with `noised_loss_budget"),
        ({"noised_loss_budget_ratio": None}, "`noised_loss_budget_ratio` to be given with"),
        ({"noised_loss_bound": 0}, "`noised_loss_bound` to be > 0, got 0. It is public"),
        ({"noised_loss_bound": -1}, "`noised_loss_bound`"),
        ({"noised_loss_bound": math.inf}, "`noised_loss_bound` to be finite"),
        ({"noised_loss_bound": math.nan}, "`noised_loss_bound`"),
        ({"noised_loss_bound": 1e31}, "`noised_loss_bound` to be from 1e-30 to 1e30"),
        ({"noised_loss_bound": 1e-31}, "`noised_loss_bound` to be from 1e-30 to 1e30"),
        ({"noised_loss_bound": True}, "`noised_loss_bound`"),
        ({"noised_loss_budget_ratio": 0}, r"`noised_loss_budget_ratio` to be in \(0, 1\)"),
        ({"noised_loss_budget_ratio": 1}, r"`noised_loss_budget_ratio` to be in \(0, 1\)"),
        ({"noised_loss_budget_ratio": "some"}, "`noised_loss_budget_ratio` to be a number"),
    ],
)
def test_bad_values_are_refused_by_name(changes, match):
    with pytest.raises(InvalidArgumentError, match=match):
        create(noise_multiplier=1.0, **changes)


def test_only_the_plan_with_both_releases_a_loss():
    assert PrivacyPlan.create(**GIVEN, noise_multiplier=1.0).mechanism.loss is None
    assert create(noise_multiplier=1.0).mechanism.loss == NoisedLoss(3.0, 0.1)
