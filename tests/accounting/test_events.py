"""Events: what is written is read back, bad values are named, what they compose to, and which
accountants bound them: every combination is either answered or refused by name."""

import dataclasses
import itertools
import json
import math

import pytest

from hf_dp.accounting import (
    ACCOUNTANTS,
    BOUNDS,
    RELATIONS,
    BestOfRandomRuns,
    Gaussian,
    GroupedGaussian,
    Ledger,
    PoissonSampledGaussian,
    PublishedForwardNoise,
    RandomAllocationGaussian,
    RecordRelease,
    SampledRecordRelease,
    SumAndRows,
    TruncatedPoissonSampledGaussian,
    UserRowsGaussian,
    epsilon,
    event_from_dict,
    knows,
    pld,
    register_accountant,
)
from hf_dp.accounting.composition import compose
from hf_dp.errors import (
    AccountingRangeError,
    ConfigError,
    InvalidArgumentError,
    UnsupportedArgumentError,
    UnsupportedEventError,
)
from hf_dp.plans import PrivacyPlan, SelectionPlan
from hf_dp.plans.units import BY_ROW, USER, Users

LOSS = {"beside": {"loss": 3}}
EVENTS = [
    Gaussian(1.5),
    PoissonSampledGaussian(0.8, 0.015, 198),
    PoissonSampledGaussian(1, 0.1, 7, **LOSS),
    TruncatedPoissonSampledGaussian(1, 0.1, 7, 40, 9, **LOSS),
    UserRowsGaussian(1.5, 0.1, 3, 4),
    RandomAllocationGaussian(0.8, 66, 198),
    BestOfRandomRuns((Gaussian(1.0), PoissonSampledGaussian(1.0, 0.1, 2)), 3.0, shape=0),
    BestOfRandomRuns(Gaussian(1.0), 3.0, "poisson", None),
    RecordRelease(1.5, 2),
    SampledRecordRelease(1.5, 0.1, 3, 4),
    SumAndRows(1.0, 2.0, 0.1, 2),
    PublishedForwardNoise(0.3, 0.01, 8, 5),
    GroupedGaussian(1.5, 0.1, 3),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_they_are_read_back_as_written(event):
    assert event_from_dict(json.loads(json.dumps(event.to_dict()))) == event
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.relations = ()


SAMPLED, TRUNCATED = PoissonSampledGaussian, TruncatedPoissonSampledGaussian


@pytest.mark.parametrize(
    ("cls", "values", "match"),
    [
        (SAMPLED, (-1, 0.1, 1), "`noise_multiplier`"),
        (SAMPLED, (math.nan, 0.1, 1), "`noise_multiplier`"),
        (SAMPLED, (True, 0.1, 1), "`noise_multiplier`"),
        (SAMPLED, (1, 1.71, 1), "`sample_rate`.*expected_batch_size / num_examples"),
        (SAMPLED, (1, -0.1, 1), "`sample_rate`"),
        (SAMPLED, (1, "0.1", 1), "`sample_rate`"),
        (SAMPLED, (1, 0.1, 1.5), "`steps`"),
        (SAMPLED, (1, 0.1, -1), "`steps`"),
        (TRUNCATED, (1, 0.1, 1, 40, 0), "`max_batch_size`"),
        (UserRowsGaussian, (1.0, 0.1, 1, 0), "`max_rows`"),
        (UserRowsGaussian, (1.0, 0.1, 1, True), "`max_rows`"),
        (RandomAllocationGaussian, (0.8, 66, 100), "`steps` to be a multiple of.*as a whole"),
        (RandomAllocationGaussian, (0.8, 1, 100), "`steps_per_allocation` to be a whole number"),
        (RecordRelease, (-1.0,), "`noise_multiplier`"),
        (SampledRecordRelease, (1.0, 1.5, 2), "`sample_rate`"),
        (SampledRecordRelease, (1.0, 0.5, 2, 0), "`num_micro_batches`"),
        (SumAndRows, (1.0, -1.0, 0.5, 2), "`record_noise_multiplier`"),
        (PublishedForwardNoise, (1.0, 0.5, 0, 2), "`num_micro_batches`"),
        (BestOfRandomRuns, ((), 10), "`run`"),
        (BestOfRandomRuns, (("run",), 10), "`run`"),
        (BestOfRandomRuns, (None, 10), "`run`"),
        (BestOfRandomRuns, ((BestOfRandomRuns(Gaussian(1.0), 3),), 10), "`run`"),
        (BestOfRandomRuns, (Gaussian(1.0), 0.5), "`mean_runs`"),
        (BestOfRandomRuns, (Gaussian(1.0), 1e305), "from 1 to 10"),
        (BestOfRandomRuns, (Gaussian(1.0), 1), "single run"),
        (BestOfRandomRuns, (Gaussian(1.0), 1 + 1e-12), "above 1 by"),
        (BestOfRandomRuns, (Gaussian(1.0), 10, "poisson"), "`shape`"),
        (BestOfRandomRuns, (Gaussian(1.0), 10, "uniform"), "`distribution`"),
        (BestOfRandomRuns, (Gaussian(1.0), 10, "truncated_negative_binomial", 1e300), "`shape`"),
        (BestOfRandomRuns, (Gaussian(1.0), 10, "truncated_negative_binomial", 1e-320), "`shape`"),
    ],
)
def test_bad_values_are_named(cls, values, match):
    with pytest.raises(InvalidArgumentError, match=match):
        cls(*values)


@pytest.mark.parametrize("noise", [-1, "1", math.nan])
def test_bad_noise_of_another_part_is_named(noise):
    with pytest.raises(InvalidArgumentError, match="`loss`"):
        PoissonSampledGaussian(1, 0.1, 1, beside={"loss": noise})
    with pytest.raises(InvalidArgumentError, match="`beside`"):
        PoissonSampledGaussian(1, 0.1, 1, beside={"sum": 1.0})


GAUSSIAN = {"type": "Gaussian", "noise_multiplier": 1, "steps": 1}


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({**GAUSSIAN, "type": "Laplace"}, "Unknown event type 'Laplace'"),
        ({"noise_multiplier": 1, "steps": 1}, "Unknown event type None"),
        ({**GAUSSIAN, "cap": 3}, r"unknown here: \['cap'\]"),
        ({"type": "Gaussian", "noise_multiplier": 1}, r"missing: \['steps'\]"),
        ({**GAUSSIAN, "noise_multiplier": -1}, "cannot be read"),
        ({**GAUSSIAN, "beside": "abc"}, "cannot be read"),
        ({**GAUSSIAN, "beside": 5}, "cannot be read"),
        ({**EVENTS[5].to_dict(), "steps": 100}, "cannot be read"),
        ({**EVENTS[6].to_dict(), "run": "Gaussian"}, "cannot be read"),
        ("Gaussian", "mapping"),
    ],
)
def test_unreadable_descriptions_are_refused(data, match):
    with pytest.raises(UnsupportedEventError, match=match):
        event_from_dict(data)


def test_composition_merges_and_drops_what_touches_no_record():
    one = PoissonSampledGaussian(1.0, 0.1, 5)
    others = PoissonSampledGaussian(1.0, 0.1, 7), PoissonSampledGaussian(2.0, 1.0, 3)
    nothing = PoissonSampledGaussian(1.0, 0.0, 9), Gaussian(3.0, 0)
    composition = compose([one, Gaussian(2.0), *others, *nothing])
    (sampled,) = composition.sampled
    assert (sampled.noise_multiplier, sampled.sample_rate, sampled.steps) == (1.0, 0.1, 12)
    assert composition.gaussian_mu == pytest.approx(1.0)  # sqrt(4 / 2^2)
    assert composition.steps == 16
    assert compose(one) == compose([one])
    assert compose(Gaussian(2.0, 3)) == compose([Gaussian(2.0)] * 3) == compose(others[1])
    assert compose(RecordRelease(2.0, 3)).events == compose(others[1]).events


def test_composition_refuses_a_subclass_and_a_stranger():
    class Special(Gaussian):
        pass

    for event in (Special(1.0), "Gaussian", None):
        with pytest.raises(UnsupportedEventError, match="got"):
            compose([event])


@pytest.mark.parametrize("event", EVENTS[2:4])
def test_parts_and_steps_of_a_sum_and_a_loss(event):
    assert event.noise_multipliers == {"sum": 1.0, "loss": 3.0}
    assert event.joint_noise_multiplier == pytest.approx(1 / math.sqrt(1 + 1 / 9), rel=1e-15)
    assert compose(event).steps == 7 and event.established
    ledger = Ledger()
    for _ in range(7):
        ledger.append(event_from_dict({**event.to_dict(), "steps": 1}), "training")
    assert ledger.events == (event,)


NOISELESS = [
    RecordRelease(0.0), SampledRecordRelease(0.0, 0.1, 1), SumAndRows(1.0, 0.0, 0.1, 1),
    UserRowsGaussian(0.0, 0.1, 1, 5), RandomAllocationGaussian(0.0, 5, 5),
    PoissonSampledGaussian(0.0, 0.1, 3, **LOSS),
    PoissonSampledGaussian(1.0, 0.1, 3, beside={"loss": 0.0}),
]  # fmt: skip


@pytest.mark.parametrize("event", NOISELESS, ids=lambda event: type(event).__name__)
def test_no_noise_in_any_part_has_no_finite_epsilon_unless_nothing_ran(event):
    assert compose(event).noiseless and math.isinf(epsilon(event, 1e-5).value)
    assert epsilon(event.with_steps(0), 1e-5).value == 0
    search = BestOfRandomRuns((PoissonSampledGaussian(0.0, 0.1, 1),), 10)
    assert epsilon(search, 1e-5, "rdp").value == math.inf
    nothing = BestOfRandomRuns((PoissonSampledGaussian(1.0, 0.0, 9),), 10)
    assert epsilon(nothing, 1e-5, "rdp").value == 0


BY_KIND = {
    knows.POISSON: PoissonSampledGaussian(2.0, 0.01, 10),
    knows.TRUNCATED: TruncatedPoissonSampledGaussian(6.0, 0.01, 10, 1000, 20),
    knows.USER_ROWS: UserRowsGaussian(4.0, 0.01, 10, 3),
    knows.GROUPED: GroupedGaussian(4.0, 0.01, 10),
    knows.ALLOCATION: RandomAllocationGaussian(2.0, 100, 100),
    knows.VISIBLE: SampledRecordRelease(4.0, 0.01, 10),
    knows.PUBLISHED: PublishedForwardNoise(2.0, 0.01, 1, 10),
    knows.SEARCH: BestOfRandomRuns((Gaussian(4.0),), 3.0),
}


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_all_pairs_of_kinds_under_all_relations_are_answered_or_refused(accountant):
    for one, other in itertools.combinations_with_replacement(BY_KIND, 2):
        events = (BY_KIND[one], BY_KIND[other])
        assert compose(BY_KIND[one]).kinds >= {one}
        for relation in RELATIONS:
            kinds = {one, other} | ({knows.REPLACE_ONE} if relation == "replace_one" else set())
            holds = all(relation in event.relations for event in events)
            if holds and kinds <= knows.KNOWS[accountant]:
                if relation != "add_remove":  # which costs what zero_out does
                    found = epsilon(events, 1e-5, accountant, relation)
                    alone = [epsilon(each, 1e-5, accountant, relation).value for each in events]
                    assert max(alone) < found.value < 50 or events[0] == events[1]
                    assert (found.kind == "bound") == (accountant in BOUNDS)
            else:
                match = "does not (hold for|know)|cannot describe|common neighboring|No bound on"
                with pytest.raises(UnsupportedEventError, match=match):
                    epsilon(events, 1e-5, accountant, relation)


GIVEN = {
    "num_examples": 1000, "clipping_norm": 0.1, "noise_multiplier": 5.0, "max_steps": 10,
    "target_delta": 1e-6,
}  # fmt: skip
USERS = Users("who", max_rows=3, sampling=BY_ROW, num_rows=2000)
ASKED = {
    knows.TRUNCATED: {"max_batch_size": 60},
    knows.USER_ROWS: {"users": USERS, "privacy_unit": USER},
    knows.ALLOCATION: {"sampling": "random_allocation"},
    knows.LOSS: {"noised_loss_bound": 3.0, "noised_loss_budget_ratio": 0.1},
    knows.SEARCH: {"mean_runs": 3.0},
    knows.SELECTION: {"selection": SelectionPlan("gradient", 0.1, 4, 0.1, 2, 5.0, None)},
}
DRAWS = {knows.TRUNCATED, knows.USER_ROWS, knows.ALLOCATION}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_plan_is_refused_exactly_where_the_table_has_no_accountant(size):
    """And a plan that is made has an epsilon by its accountant."""
    for kinds in itertools.combinations(ASKED, size):
        changes = {name: value for kind in kinds for name, value in ASKED[kind].items()}
        able = knows.accountants_of(kinds) if len(DRAWS & set(kinds)) < 2 else ()
        for accountant in ACCOUNTANTS:
            options = {**GIVEN, "expected_batch_size": 50, "accountant": accountant, **changes}
            if accountant in able:
                plan = PrivacyPlan.create(**options)
                assert 0 < epsilon(plan.events(), plan.delta, accountant).value < 100
            else:
                with pytest.raises(UnsupportedArgumentError, match="Expected `"):
                    PrivacyPlan.create(**options)


def test_planted_rows_that_promise_too_much_are_seen(monkeypatch):
    """An accountant whose row claims a kind that it leaves out would answer 0 for it."""
    monkeypatch.setitem(knows.KNOWS, "prv", knows.KNOWS["prv"] | {knows.ALLOCATION})
    with pytest.raises((AssertionError, AccountingRangeError)):
        test_all_pairs_of_kinds_under_all_relations_are_answered_or_refused("prv")


def test_a_name_or_kind_that_cannot_be_registered_is_refused():
    with pytest.raises(InvalidArgumentError):
        epsilon(Gaussian(1.0), 1e-5, "zcdp")
    for name, kinds in (("pld", {knows.POISSON}), ("zcdp", {"what is it"})):
        with pytest.raises(ConfigError, match="Expected an accountant"):
            register_accountant(name, pld, kinds, bound=True)
