"""The plan couples sample rate, steps, noise and delta; each is derived once and each bad value is
refused by name. So are the noise, the exact sum and the words of a noised loss."""

import json
import math
import re
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

from hf_dp.accounting import (
    Gaussian,
    LedgerEntry,
    PoissonSampledGaussian,
    TruncatedPoissonSampledGaussian,
    epsilon,
)
from hf_dp.errors import CalibrationError, ConfigError, InvalidArgumentError
from hf_dp.plans import DpSgdPlan, PrivacyPlan, PrivateEncoderPlan, SelectionPlan
from hf_dp.plans.dp_sgd import NoisedLoss
from hf_dp.plans.draws import Groups
from hf_dp.plans.rounding import (
    ROUNDING_MARGIN,
    clipping_share,
    regrouping_share,
    rounding_margin,
    slack_cap,
)

GIVEN = {
    "num_examples": 1000, "expected_batch_size": 50, "clipping_norm": 0.1, "num_train_epochs": 2.0,
    "noise_multiplier": 1.5,
}  # fmt: skip
LOSS = {"noised_loss_bound": 3.0, "noised_loss_budget_ratio": 0.1}
TARGET = {"noise_multiplier": None, "target_epsilon": 3.0, "accountant": "rdp"}
SST2 = {"num_examples": 67_349, "expected_batch_size": 1024, "num_train_epochs": 3.0}
SELECTION = {
    "quantity": "gradient", "sample_rate": 0.02, "iterations": 5, "clipping_norm": 0.1,
    "norm_order": 2, "noise_multiplier": None, "budget_ratio": 0.1,
}  # fmt: skip
LARGE = {"num_examples": 60_000, "expected_batch_size": 6_000}


def create(**changes: object) -> PrivacyPlan:
    return PrivacyPlan.create(**{**GIVEN, **changes})


def spent(plan: PrivacyPlan, *prior: object) -> float:
    return epsilon([*prior, *plan.events()], plan.delta, plan.accountant).value


def test_derived_numbers():
    plan = create()
    assert (plan.sample_rate, plan.steps, plan.delta) == (50 / 1000, 40, 1 / 2000)
    assert plan.noise_std == pytest.approx(0.15 * (1 + ROUNDING_MARGIN), rel=1e-15)
    assert plan.target_epsilon is None and create(target_delta=1e-5).delta == 1e-5
    assert (plan.accountant, plan.clipping) == ("pld", "flat")
    assert (plan.privacy_unit, plan.neighboring_relation) == ("example", "zero_out")
    with pytest.raises(FrozenInstanceError):
        plan.steps = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"num_train_epochs": 3}, 60),
        ({"num_train_epochs": 0.01}, 1),
        # ceil: never fewer passes than asked for
        ({"num_train_epochs": 1, "expected_batch_size": 300}, 4),
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


# -- the noise --


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_calibrated_noise_meets_the_target_and_not_much_more(accountant):
    plan = create(**{**TARGET, "accountant": accountant})
    assert (plan.target_epsilon, plan.accountant) == (3.0, accountant)
    assert 3.0 * 0.98 < spent(plan) <= 3.0


def test_prior_events_are_paid_for():
    prior = [PoissonSampledGaussian(1.0, 0.05, 20)]
    after = create(**TARGET, prior_events=prior)
    assert after.noise_multiplier > create(**TARGET).noise_multiplier
    assert spent(after, *prior) <= 3.0


@pytest.mark.parametrize("target", [0.5, 2.0, 8.0])
def test_training_and_selection_together_just_meet_the_target(target):
    """The training alone gets its share (DP-FROST, section 4.6), the selection all the rest."""
    selection = SelectionPlan(**SELECTION)
    plan = create(**TARGET | SST2 | {"target_epsilon": target}, selection=selection)
    assert epsilon(plan.event(), plan.delta, "rdp").value == pytest.approx(0.9 * target, rel=2e-4)
    assert spent(plan) <= target
    less = replace(plan.selection, noise_multiplier=plan.selection.noise_multiplier * 0.999)
    assert spent(replace(plan, selection=less)) > target


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"sample_rate": 1.0, "iterations": 10**7},
            CalibrationError,
            "does not fit beside the training.*selection_budget_ratio",
        ),
        ({"noise_multiplier": 1.0}, InvalidArgumentError, "`selection_noise_multiplier`"),
        ({"budget_ratio": None}, InvalidArgumentError, "`selection_noise_multiplier`"),
        ({"budget_ratio": 1.0}, InvalidArgumentError, "`selection_budget_ratio`"),
    ],
)
def test_a_selection_that_cannot_be_paid_says_what_to_change(changes, error, message):
    selection = {**SELECTION, **changes}
    with pytest.raises(error, match=message):
        create(**TARGET | {"target_epsilon": 0.05}, selection=SelectionPlan(**selection))


@pytest.mark.parametrize("ratio", [0.001, 0.1, 0.9])
def test_sum_and_losses_together_meet_the_target_and_are_divided_by_the_ratio(ratio):
    plan = create(**TARGET, **{**LOSS, "noised_loss_budget_ratio": ratio})
    event = plan.event()
    assert event.noise_multiplier == plan.noise_multiplier
    assert 2.99 < spent(plan) <= 3.0
    joint = event.joint_noise_multiplier
    assert event.noise_multiplier**-2 == pytest.approx((1 - ratio) * joint**-2, rel=1e-12)
    assert event.noise_multipliers["loss"] ** -2 == pytest.approx(ratio * joint**-2, rel=1e-12)
    assert joint == pytest.approx(create(**TARGET).noise_multiplier, rel=1e-3)


def test_the_target_pays_for_losses_a_selection_and_earlier_runs():
    prior = [Gaussian(5.0)]
    plan = create(**TARGET, **LOSS, selection=SelectionPlan(**SELECTION), prior_events=prior)
    assert [type(event) for event in plan.events()] == [PoissonSampledGaussian] * 2
    assert 2.99 < spent(plan, *prior) <= 3.0
    # Planted: noise that was calibrated for the gradients alone.
    sigma = create(**TARGET).noise_multiplier
    assert spent(create(accountant="rdp", **{**LOSS, "noise_multiplier": sigma})) > 3.05


def test_a_group_has_no_more_rows_than_there_are():
    groups = DpSgdPlan(0.1, 2.0, draw=Groups(100))
    for length in ({"max_steps": 3}, {"num_train_epochs": 3}):
        with pytest.raises(InvalidArgumentError, match=r"`rows_per_group` .* of rows \(50\)"):
            PrivacyPlan.solve(num_examples=50, expected_batch_size=4, mechanism=groups, **length)


def test_noise_that_is_given_is_that_of_the_gradients():
    plan, without = create(accountant="rdp", **LOSS), create(accountant="rdp")
    assert plan.event(3) == PoissonSampledGaussian(1.5, 0.05, 3, beside={"loss": 4.5})
    capped = create(max_batch_size=60, **LOSS).event()
    assert capped == TruncatedPoissonSampledGaussian(1.5, 0.05, 40, 1000, 60, beside={"loss": 4.5})
    assert plan.mechanism.loss.std(plan, plan.noise_multiplier) == pytest.approx(4.5 * 3.0 / 50)
    assert spent(plan) > 1.02 * spent(without)
    released = plan.step_release()
    assert released.noise_std("loss") == pytest.approx(4.5 * 3.0)
    assert released.sensitivities["loss"] == 3.0
    assert released.noise_std("sum") == plan.noise_std == without.noise_std


def test_the_figures_on_the_page():
    alone = create(**{**TARGET, **SST2})
    plan = create(**{**TARGET, **SST2}, noised_loss_bound=1.5, noised_loss_budget_ratio=0.01)
    sigmas = [round(each.noise_multiplier, 4) for each in (alone, plan)]
    assert sigmas == [0.8254, 0.8296]
    assert round(plan.mechanism.loss.std(plan, plan.noise_multiplier), 3) == 0.012


# -- what rounds --


@pytest.mark.parametrize("bound", [3.0, 0.1, 1e-30, 1e30, 2.0**10, math.nextafter(4.0, 0)])
@pytest.mark.parametrize("rows", [2, 1000, 2**20, 2**20 - 1, 10**9])
def test_a_sum_of_all_losses_is_exact_in_float64(bound, rows):
    plan = create(num_examples=rows, expected_batch_size=2, max_steps=1)
    unit = NoisedLoss(bound, 0.1).unit(plan)
    assert math.frexp(unit)[0] == 0.5  # a power of two
    each = math.floor(bound / unit)
    assert rows * each <= 2**53  # as whole numbers
    assert unit <= bound * 2.0**-20  # what is rounded off does not matter


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


def test_what_is_clipped_does_not_depend_on_small_groups():
    assert slack_cap(1) == slack_cap(16) == 2.0**-12 == 4 * slack_cap(64)
    assert regrouping_share(64) == 1 > regrouping_share(65) > regrouping_share(256) > 0.95
    assert slack_cap(1000) == slack_cap(64)  # real rows keep their weights


def test_the_plan_takes_share_and_margin_of_its_own_draws():
    plan = create(**LARGE, noise_multiplier=1.0)
    assert plan.clips_to == 0.1 * clipping_share(6_000, 60_000) < 0.1
    margin = plan.mechanism.margin(plan)
    assert margin == rounding_margin(6_000, 60_000) > ROUNDING_MARGIN
    assert plan.noise_std == pytest.approx(0.1 * (1 + margin), rel=1e-15)
    below = replace(plan, mechanism=PrivateEncoderPlan(0.1, 1.0, record_noise_multiplier=1.0))
    assert (below.clips_to, below.noise_std) == (plan.clips_to, plan.noise_std)
    capped = create(**LARGE, max_batch_size=6_000)
    assert capped.mechanism.margin(capped) < margin


# -- what is refused --

REFUSED = [
    ({"num_examples": 1}, "`num_examples` to be a whole number >= 2, got 1"),
    ({"num_examples": 10.5}, "`num_examples` to be a whole number >= 2, got 10.5"),
    ({"num_examples": True}, "`num_examples` to be a number, got True"),
    ({"expected_batch_size": None}, "`expected_batch_size` to be a number, got None"),
    ({"expected_batch_size": 0}, "`expected_batch_size` to be > 0, got 0"),
    ({"expected_batch_size": 1001}, "`expected_batch_size` to be at most num_examples (1000)"),
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
    ({"noise_multiplier": float("inf")}, "`noise_multiplier` to be finite, got inf"),
    ({"noise_multiplier": None, "target_epsilon": 0}, "`target_epsilon` to be > 0, got 0"),
    ({"noise_multiplier": None, "target_epsilon": "3"}, "`target_epsilon` to be a number, got '3'"),
    ({"target_delta": 0}, "`target_delta` to be in (0, 1), got 0"),
    ({"target_delta": 1e-3}, "`target_delta` to be < 1/num_examples (0.001), got 0.001. At 1/N"),
    ({"target_delta": 1e-3}, "would count as private. Set target_delta=1e-5."),
    ({"target_delta": 1e-3, "num_examples": 9000}, "as private. Leave it unset for 1/(2N)."),
    ({"num_train_epochs": 0}, "`num_train_epochs` to be > 0, got 0"),
    ({"num_train_epochs": float("inf")}, "`num_train_epochs` to be finite, got inf"),
    ({"clipping_norm": 0}, "`per_example_max_grad_norm` to be > 0, got 0"),
    ({"clipping_norm": None}, "`per_example_max_grad_norm` to be a number, got None"),
    ({"max_steps": 2.5}, "`max_steps` to be a whole number"),
    ({"max_batch_size": 5}, "`max_logical_batch_size` to be at least expected_batch_size"),
    ({"max_batch_size": 0}, "`max_logical_batch_size` to be a whole number >= 1, got 0"),
    ({"accountant": "plt"}, "`accountant` to be one of"),
    ({"clipping": "flatt"}, "`clipping` to be one of"),
    *[
        ({**LOSS, name: value}, f"`{name}` to be {expected}")
        for name, value, expected in (
            ("noised_loss_bound", 0, "> 0, got 0. It is public"),
            ("noised_loss_bound", math.inf, "finite"),
            ("noised_loss_bound", 1e31, "from 1e-30 to 1e30"),
            ("noised_loss_bound", 1e-31, "from 1e-30 to 1e30"),
            ("noised_loss_bound", True, "a number"),
            ("noised_loss_bound", None, "given with `noised_loss_budget_ratio`"),
            ("noised_loss_budget_ratio", None, "given with `noised_loss_bound`"),
            ("noised_loss_budget_ratio", 0, "in (0, 1)"),
            ("noised_loss_budget_ratio", 1, "in (0, 1)"),
            ("noised_loss_budget_ratio", "some", "a number"),
        )
    ],
]


@pytest.mark.parametrize(
    ("changes", "message"), REFUSED, ids=[str(changes) for changes, _ in REFUSED]
)
def test_bad_values_are_named(changes, message):
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        create(**changes)


@pytest.mark.parametrize("more", [{"expected_batch_size": 2000.0}, {"delta": 0.1}, {"steps": 0}])
def test_a_plan_cannot_be_changed_into_one_that_cannot_be(more):
    with pytest.raises(InvalidArgumentError, match="expected_batch_size|target_delta|steps"):
        replace(create(), **more)
    with pytest.raises(InvalidArgumentError, match="per_example_max_grad_norm"):
        DpSgdPlan(0)


# -- as data, and in words --


def test_a_plan_is_read_back_and_nothing_is_guessed():
    plan = create(**LOSS)
    for each in (create(), plan, create(**TARGET, max_steps=3)):
        values = json.loads(json.dumps(each.to_dict()))
        assert PrivacyPlan.from_dict(values) == each
        # Derived numbers are computed again: sampler and accountant cannot be edited apart.
        assert PrivacyPlan.from_dict({**values, "sample_rate": 9.0, "noise_std": 9.0}) == each
        assert (values["sample_rate"], values["noise_std"]) == (each.sample_rate, each.noise_std)
    assert create().to_dict()["mechanism"] == {
        "name": "dp_sgd", "clipping_norm": 0.1, "noise_multiplier": 1.5, "clipping": "flat",
        "draw": {"name": "poisson"}, "loss": None, "search": None,
    }  # fmt: skip
    written = plan.to_dict()
    assert written["mechanism"]["loss"] == {"bound": 3.0, "budget_ratio": 0.1}
    del written["mechanism"]["loss"]["bound"]
    with pytest.raises(ConfigError, match="bound"):
        PrivacyPlan.from_dict(written)
    del written["mechanism"]["loss"]
    with pytest.raises(ConfigError, match="loss"):
        PrivacyPlan.from_dict(written)
    for edited in (None, 3, {"name": "dp_sgd"}, {"name": "other"}, {"name": []}):
        with pytest.raises(ConfigError):
            PrivacyPlan.from_dict({**plan.to_dict(), "mechanism": edited})
    del written["delta"], written["steps"]
    with pytest.raises(ConfigError, match=r"missing \['delta', 'steps'\]"):
        PrivacyPlan.from_dict(written)


def test_a_plan_knows_its_own_entries():
    plan = create(**LOSS)
    assert plan.makes(LedgerEntry(plan.event(4), "training"))
    other = PoissonSampledGaussian(1.5, 0.05, 4, beside={"loss": 5.0})
    assert not plan.makes(LedgerEntry(other, "training"))
