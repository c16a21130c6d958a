"""The table of what accountants bound: every combination is either answered or refused by name."""

from __future__ import annotations

import itertools

import pytest

from hf_dp.accounting import (
    ACCOUNTANTS,
    BOUNDS,
    RELATIONS,
    BestOfRandomRuns,
    Gaussian,
    PoissonSampledGaussian,
    PublishedForwardNoise,
    RandomAllocationGaussian,
    SampledRecordRelease,
    TruncatedPoissonSampledGaussian,
    UserRowsGaussian,
    epsilon,
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

EVENTS = {
    knows.POISSON: PoissonSampledGaussian(2.0, 0.01, 10),
    knows.TRUNCATED: TruncatedPoissonSampledGaussian(6.0, 0.01, 10, 1000, 20),
    knows.USER_ROWS: UserRowsGaussian(4.0, 0.01, 10, 3),
    knows.ALLOCATION: RandomAllocationGaussian(2.0, 100, 100),
    knows.VISIBLE: SampledRecordRelease(4.0, 0.01, 10),
    knows.PUBLISHED: PublishedForwardNoise(2.0, 0.01, 1, 10),
    knows.SEARCH: BestOfRandomRuns((Gaussian(4.0),), 3.0),
}


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_all_pairs_of_kinds_under_all_relations_are_answered_or_refused(accountant):
    for one, other in itertools.combinations_with_replacement(EVENTS, 2):
        events = (EVENTS[one], EVENTS[other])
        assert compose(EVENTS[one]).kinds >= {one}
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
