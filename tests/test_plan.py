"""The plan couples sample rate, steps, noise and delta; each is derived once and each bad value is
refused by name."""

from __future__ import annotations

import json
import re
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from hf_dp.accounting import PoissonSampledGaussian, epsilon
from hf_dp.errors import ConfigError, InvalidArgumentError
from hf_dp.plans import DpSgdPlan, PrivacyPlan
from hf_dp.plans.rounding import (
    ROUNDING_MARGIN,
    clipping_share,
    regrouping_share,
    rounding_margin,
    slack_cap,
)

GIVEN = {
    "num_examples": 1000,
    "expected_batch_size": 50,
    "clipping_norm": 0.1,
    "num_train_epochs": 2.0,
    "noise_multiplier": 1.5,
}


def create(**changes: object) -> PrivacyPlan:
    return PrivacyPlan.create(**{**GIVEN, **changes})


def test_derived_numbers():
    plan = create()
    assert plan.sample_rate == 50 / 1000
    assert plan.steps == 40
    assert plan.delta == 1 / 2000
    assert plan.noise_std == pytest.approx(0.15 * (1 + ROUNDING_MARGIN), rel=1e-15)
    assert plan.target_epsilon is None
    assert (plan.accountant, plan.clipping) == ("pld", "flat")
    assert (plan.privacy_unit, plan.neighboring_relation) == ("example", "zero_out")


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"num_train_epochs": 3}, 60),
        ({"num_train_epochs": 0.01}, 1),
        (
            {"num_train_epochs": 1, "expected_batch_size": 300},
            4,
        ),  # ceil: never fewer passes than asked for
        ({"max_steps": 7}, 7),
        ({"max_steps": -1}, 40),
        ({"num_train_epochs": 1, "expected_batch_size": 1000}, 1),
    ],
)
def test_steps(changes, steps):
    assert create(**changes).steps == steps


def test_sampler_event_and_noise_read_the_same_numbers():
    plan = create()
    sampler = plan.sampler()
    assert (sampler.num_examples, sampler.sample_rate, sampler.steps) == (1000, 0.05, 40)
    assert plan.event() == PoissonSampledGaussian(1.5, 0.05, 40)
    assert plan.event(3) == PoissonSampledGaussian(1.5, 0.05, 3)
    assert plan.sampler(5).steps == 5
    assert sampler.event(plan.noise_multiplier, plan.steps) == plan.event()


def test_the_samplers_source_can_be_replaced_in_tests():
    plan = create()
    assert plan.sampler(random_bytes=lambda count: bytes(count)).draw() == list(range(1000))


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_calibrated_noise_meets_the_target_and_not_much_more(accountant):
    plan = create(noise_multiplier=None, target_epsilon=3.0, accountant=accountant)
    assert plan.target_epsilon == 3.0
    assert plan.accountant == accountant
    spent = epsilon([plan.event()], plan.delta, accountant).value
    assert 3.0 * 0.98 < spent <= 3.0


def test_prior_events_are_paid_for():
    alone = create(noise_multiplier=None, target_epsilon=3.0, accountant="rdp")
    prior = [PoissonSampledGaussian(1.0, 0.05, 20)]
    after = create(noise_multiplier=None, target_epsilon=3.0, accountant="rdp", prior_events=prior)
    assert after.noise_multiplier > alone.noise_multiplier
    assert epsilon([*prior, after.event()], after.delta, "rdp").value <= 3.0


def test_the_plan_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        create().noise_multiplier = 0.1  # type: ignore[misc]


def test_delta_given():
    assert create(target_delta=1e-5).delta == 1e-5


REFUSED = [
    ({"num_examples": 1}, "`num_examples` to be a whole number >= 2, got 1"),
    ({"num_examples": 10.5}, "`num_examples` to be a whole number >= 2, got 10.5"),
    ({"num_examples": True}, "`num_examples` to be a number, got True"),
    ({"expected_batch_size": None}, "`expected_batch_size` to be given, got None"),
    ({"expected_batch_size": 0}, "`expected_batch_size` to be > 0, got 0"),
    ({"expected_batch_size": -5}, "`expected_batch_size` to be > 0, got -5"),
    (
        {"expected_batch_size": 1001},
        "`expected_batch_size` to be at most num_examples (1000), got 1001",
    ),
    ({"expected_batch_size": float("nan")}, "`expected_batch_size` to be finite, got nan"),
    (
        {"noise_multiplier": None},
        "`target_epsilon` or `noise_multiplier` (None) to be given, exactly one of them",
    ),
    (
        {"target_epsilon": 3.0},
        "`target_epsilon` or `noise_multiplier` (1.5) to be given, exactly one of them, got 3.0",
    ),
    ({"noise_multiplier": 0}, "`noise_multiplier` to be > 0, got 0. Noise 0 gives no privacy."),
    ({"noise_multiplier": -1.0}, "`noise_multiplier` to be > 0, got -1.0"),
    ({"noise_multiplier": float("inf")}, "`noise_multiplier` to be finite, got inf"),
    ({"noise_multiplier": None, "target_epsilon": 0}, "`target_epsilon` to be > 0, got 0"),
    ({"noise_multiplier": None, "target_epsilon": "3"}, "`target_epsilon` to be a number, got '3'"),
    ({"target_delta": 0}, "`target_delta` to be in (0, 1), got 0"),
    ({"target_delta": 1}, "`target_delta` to be in (0, 1), got 1"),
    ({"target_delta": 1e-3}, "`target_delta` to be < 1/num_examples (0.001), got 0.001"),
    ({"num_train_epochs": 0}, "`num_train_epochs` to be > 0, got 0"),
    ({"num_train_epochs": float("inf")}, "`num_train_epochs` to be finite, got inf"),
    ({"clipping_norm": 0}, "`per_example_max_grad_norm` to be > 0, got 0"),
    ({"clipping_norm": None}, "`per_example_max_grad_norm` to be a number, got None"),
    ({"max_steps": 2.5}, "`max_steps` to be a whole number"),
    ({"max_steps": float("inf")}, "`max_steps` to be finite, got inf"),
    ({"max_batch_size": 5}, "`max_logical_batch_size` to be at least expected_batch_size"),
    ({"max_batch_size": 0}, "`max_logical_batch_size` to be a whole number >= 1, got 0"),
    ({"accountant": "plt"}, "`accountant` to be one of"),
    ({"clipping": "flatt"}, "`clipping` to be one of"),
]


@pytest.mark.parametrize(
    ("changes", "message"), REFUSED, ids=[str(changes) for changes, _ in REFUSED]
)
def test_bad_values_are_named(changes, message):
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        create(**changes)


def test_dict_round_trip_through_json():
    for plan in (
        create(),
        create(noise_multiplier=None, target_epsilon=2.0, accountant="rdp", max_steps=3),
    ):
        values = json.loads(json.dumps(plan.to_dict()))
        assert PrivacyPlan.from_dict(values) == plan
        assert values["sample_rate"] == plan.sample_rate
        assert values["noise_std"] == plan.noise_std


def test_a_missing_field_is_named():
    values = create().to_dict()
    del values["delta"], values["steps"]
    with pytest.raises(ConfigError, match=r"lacks \['steps', 'delta'\]"):
        PrivacyPlan.from_dict(values)


@pytest.mark.parametrize("derived", ["sample_rate", "noise_std"])
def test_an_edited_derived_number_is_not_believed(derived):
    """They are computed from the fields, so an edit cannot make the sampler and the accountant
    disagree."""
    plan = create()
    assert PrivacyPlan.from_dict({**plan.to_dict(), derived: 123.0}) == plan


def test_sampling_more_than_everyone_is_impossible():
    with pytest.raises(InvalidArgumentError, match="sample_rate"):
        replace(create(), expected_batch_size=2000.0).sampler()


@pytest.mark.parametrize(
    ("draw", "margin"), [(1, 2**-12), (1024, 2**-12), (6144, 2**-11), (100_000, 2**-7)]
)
def test_the_margin_covers_how_far_float32_rounds_one_example_beside_a_whole_draw(draw, margin):
    clipping_norm = np.float32(0.1)
    beside = np.arange(max(1, draw - 50), draw + 1, dtype=np.float32) * clipping_norm
    steps = (beside + clipping_norm) - beside  # one example more, aligned with all others
    assert np.abs(steps).max() <= clipping_norm * (1 + rounding_margin(draw))
    assert margin <= rounding_margin(draw) * 2  # it grows with the draw, and not beyond need
    assert rounding_margin(draw) <= margin * 2


@pytest.mark.parametrize("draw", [1, 8, 512, 513, 1_024, 6_144, 100_000, 2_000_000])
@pytest.mark.parametrize("size", [1, 2, 16, 64, 300])
def test_what_is_clipped_to_leaves_room_for_all_that_rounds(draw, size):
    """One example's part; its norm, and those of all that regroup, with it and without it; what
    rounds in their products; and the additions of one product an example, in both sums."""
    share = clipping_share(draw, draw) * regrouping_share(size)
    margin = rounding_margin(draw, draw)
    parts = [1.0, (1 + 2 * size) * 5e-5, 2 * size * slack_cap(size), draw * draw * 2.0**-42]
    assert 0 < share <= 1 and share * sum(parts) <= 1 + margin + 1e-12
    assert share > (0.93 if draw <= 100_000 else 0.6)  # and little more than that


def test_the_plan_clips_to_that_share():
    plan = PrivacyPlan.create(
        num_examples=60_000, expected_batch_size=6_000, clipping_norm=0.1, noise_multiplier=1.0
    )
    assert plan.clips_to == 0.1 * clipping_share(6_000, 60_000) < 0.1


def test_what_is_clipped_does_not_depend_on_small_groups():
    assert slack_cap(1) == slack_cap(16) == 2.0**-12 == 4 * slack_cap(64)
    assert regrouping_share(64) == 1 > regrouping_share(65) > regrouping_share(256) > 0.95
    assert slack_cap(1000) == slack_cap(64)  # real rows keep their weights


def test_the_plan_takes_the_margin_of_its_own_draws():
    plan = PrivacyPlan.create(
        num_examples=60_000, expected_batch_size=6_000, clipping_norm=0.1, noise_multiplier=1.0
    )
    assert plan.mechanism.margin(plan) == rounding_margin(6_000, 60_000) > ROUNDING_MARGIN
    assert plan.noise_std == pytest.approx(0.1 * (1 + plan.mechanism.margin(plan)), rel=1e-15)
    capped = PrivacyPlan.create(
        num_examples=60_000,
        expected_batch_size=6_000,
        clipping_norm=0.1,
        noise_multiplier=1.0,
        max_batch_size=6_000,
    )
    assert capped.mechanism.margin(capped) < plan.mechanism.margin(plan)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"clipping": "other"}, "clipping"),
        ({"clipping_norm": 0}, "per_example_max_grad_norm"),
        ({"noise_multiplier": 0}, "noise_multiplier"),
    ],
)
def test_a_mechanism_cannot_be_planned_with_values_that_have_no_meaning(values, name):
    with pytest.raises(InvalidArgumentError, match=name):
        DpSgdPlan(**{"clipping_norm": 1.0, "noise_multiplier": 2.0, **values})
