"""A statement is as weak as the weakest thing done with the rows, over all runs that it names."""

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from statements import SMALL, ledger_of, problems, rewrite, statement_of

from hf_dp.accounting import GroupedGaussian, Ledger, PublishedForwardNoise, RecordRelease
from hf_dp.accounting.events import BandedGaussian, TruncatedPoissonSampledGaussian
from hf_dp.cards.card import render_card
from hf_dp.cards.details import CardDetails
from hf_dp.errors import InvalidArgumentError, LedgerError
from hf_dp.plans import DpSgdPlan, FrozenPlan, PrivacyPlan, PublishedPlan
from hf_dp.plans.draws import BY_PLACE, Groups
from hf_dp.plans.units import (
    EXAMPLE,
    FEATURES,
    NONE,
    RECORD_ZERO_OUT,
    RELATIONS,
    UNITS,
    ZERO_OUT,
    weakest_relation,
    weakest_unit,
)
from hf_dp.statement import statement as statement_module
from hf_dp.statement.audited import AuditResult
from hf_dp.statement.durable import Beside
from hf_dp.statement.evidence import Evidence, disagreements, earlier_runs, read, write
from hf_dp.statement.facts import EarlierRun, Weaknesses, each_once
from hf_dp.statement.statement import PrivacyStatement

SGD = SMALL
FROZEN = dataclasses.replace(SGD, mechanism=FrozenPlan(1.0, 2.0))
IN_VECTOR = dataclasses.replace(
    SGD, mechanism=FrozenPlan(1.0, 2.0, labels_in_vector=True, num_classes=2)
)
PUBLISHED = dataclasses.replace(SGD, mechanism=PublishedPlan(1.0, 2.0), accountant="gdp_clt")
SAFE = EarlierRun("a" * 32, EXAMPLE, ZERO_OUT)


def made(folder: Path, plan: PrivacyPlan, run_id: str = "b" * 32, **weak: Any) -> Any:
    """The evidence of a run of this plan."""
    ledger = Ledger()
    for planned in plan.releases_before():
        ledger.append(planned.event, planned.purpose)
    if plan.releases_each_step:
        ledger.append(plan.event(4), "training")
    write(folder, Evidence(plan, ledger, run_id, Weaknesses(**weak)))
    return read(folder)


def after(*earlier: EarlierRun, **facts: Any) -> PrivacyStatement:
    """The statement of DP-SGD after runs with these claims."""
    ledger = Ledger()
    ledger.append(RecordRelease(3.0, 1), "earlier run")
    ledger.append(SGD.event(4), "training")
    return statement_of(SGD, ledger, earlier=earlier, **facts)


# -- codes ---


@pytest.mark.parametrize(
    ("plan", "unit", "relation"),
    [
        (SGD, EXAMPLE, ZERO_OUT),
        (FROZEN, FEATURES, RECORD_ZERO_OUT),
        (IN_VECTOR, EXAMPLE, RECORD_ZERO_OUT),
        (PUBLISHED, NONE, NONE),
    ],
)
def test_codes_of_a_plan(plan, unit, relation) -> None:
    assert (plan.mechanism.unit, plan.mechanism.relation) == (unit, relation)


def test_the_weakest_of_any_two_is_none_stronger() -> None:
    for one, other in itertools.product(UNITS, repeat=2):
        both = weakest_unit((one, other))
        assert UNITS.index(both) == max(UNITS.index(one), UNITS.index(other))
    for one, other in itertools.product(RELATIONS, repeat=2):
        assert weakest_relation((one, other)) == weakest_relation((other, one))
    assert weakest_relation((ZERO_OUT, RECORD_ZERO_OUT)) == RECORD_ZERO_OUT
    assert weakest_relation((RECORD_ZERO_OUT, NONE)) == NONE


# -- what is kept of a run ---


def test_a_run_is_kept_after_those_that_it_names(tmp_path) -> None:
    weak = {"released": ("loss",), "rows_are_chunks": True, "model_selection": True}
    evidence = made(tmp_path, FROZEN, earlier=(SAFE,), **weak)
    this = EarlierRun("b" * 32, FEATURES, RECORD_ZERO_OUT, **weak)
    assert earlier_runs(evidence) == (SAFE, this)


def test_each_run_is_kept_once_as_weak_as_any_account_of_it() -> None:
    later = dataclasses.replace(SAFE, released=("loss",), evaluation_compared=False)
    other = EarlierRun("c", FEATURES, RECORD_ZERO_OUT)
    assert each_once((SAFE, other, later)) == (later, other)
    assert Weaknesses(earlier=(later, SAFE)).earlier == (later,)


STRONG = Weaknesses()
WEAK = [
    Weaknesses(insecure_seed=True),
    Weaknesses(released=("loss",)),
    Weaknesses(model_selection=True),
    Weaknesses(rows_are_chunks=True),
    Weaknesses(evaluation_compared=False),
    Weaknesses(experts=True),
    Weaknesses(public_adapter=True),
    Weaknesses(refuted=True),
    Weaknesses(conditions=("whether",)),
    Weaknesses(earlier=(SAFE,)),
    Weaknesses(earlier=(dataclasses.replace(SAFE, insecure_seed=True),)),
]


@pytest.mark.parametrize("weak", WEAK)
def test_what_weakens_adds_up_and_never_goes_away(weak) -> None:
    assert weak.includes(STRONG) and not STRONG.includes(weak)
    assert STRONG.merged(weak).includes(weak) and weak.merged(STRONG) == weak
    for other in WEAK:
        both = weak.merged(other)
        assert both.includes(weak) and both.includes(other)
    assert Weaknesses.from_dict(json.loads(json.dumps(weak.to_dict()))) == weak


@pytest.mark.parametrize(
    "name",
    [
        "insecure_seed",
        "released",
        "model_selection",
        "rows_are_chunks",
        "evaluation_compared",
        "experts",
        "public_adapter",
        "refuted",
        "conditions",
    ],
)
def test_planted_merge_that_forgets_one_is_seen(name, monkeypatch) -> None:
    """(By the test above.)"""
    weak = next(each for each in WEAK if getattr(each, name) != getattr(STRONG, name))
    merged = Weaknesses.merged
    monkeypatch.setattr(
        Weaknesses,
        "merged",
        lambda self, other: dataclasses.replace(merged(self, other), **{name: getattr(self, name)}),
    )
    assert not STRONG.merged(weak) == weak and STRONG.includes(weak)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"unit": "nation"}, "`unit` to be one of"),
        ({"relation": "add_remove"}, "`relation` to be one of"),
        ({"run_id": ""}, "`run_id` to be a name"),
        ({"rows_are_chunks": 1}, "`rows_are_chunks` to be True or False"),
        ({"evaluation_compared": None}, "`evaluation_compared` to be True or False"),
        ({"released": [""]}, "`released` to be a list of names"),
    ],
)
def test_an_unknown_claim_is_refused(values, message) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        dataclasses.replace(SAFE, **values)
    with pytest.raises(LedgerError, match=message):
        EarlierRun.from_dict({**SAFE.to_dict(), **values})


# -- the statement ---


def test_after_a_run_with_public_labels_no_label_is_claimed() -> None:
    """The frozen run knew the labels; DP-SGD after it cannot make them private again."""
    earlier = EarlierRun("f" * 32, FEATURES, RECORD_ZERO_OUT)
    statement = after(earlier)
    assert statement.unit_code == FEATURES
    assert "label is stated as public" in statement.unit
    assert "adding or removing a row is not covered" in statement.neighboring_relation.lower()
    assert (
        "the text (or image) of one row, labels being public, of the training set"
        in statement.sentence()
    )
    (line,) = [line for line in statement.not_covered if "labels of the training rows" in line]
    assert "entered the loss of the earlier run ffffffff as they are" in line
    assert statement.to_dict()["unit"] == FEATURES
    assert "f" * 32 in render_card(statement, CardDetails())
    alone = after(SAFE)
    assert (alone.unit_code, alone.to_dict()["unit"]) == (EXAMPLE, EXAMPLE)
    assert not any("labels of the training rows" in line for line in alone.not_covered)
    assert statement.epsilon == alone.epsilon


def test_planted_statement_of_this_run_alone_is_seen(monkeypatch) -> None:
    monkeypatch.setattr(statement_module.units, "weakest_unit", lambda units: next(iter(units)))
    earlier = EarlierRun("f" * 32, FEATURES, RECORD_ZERO_OUT)
    assert after(earlier).unit_code == EXAMPLE  # what the test above refuses


def test_relations_of_several_runs() -> None:
    public = EarlierRun("e" * 32, FEATURES, RECORD_ZERO_OUT)
    assert "its released vector holds noise" in after(SAFE, public).neighboring_relation
    ended = re.compile("derived from the number of rows$|by another.*other groups$|is not covered$")

    def said(*events: Any, plan: PrivacyPlan = SGD) -> str:
        ledger = Ledger()
        for event in events:
            ledger.append(event, "training")
        words = statement_of(plan, ledger).neighboring_relation
        return ended.search(words)[0]

    poisson, cut = SGD.event(4), TruncatedPoissonSampledGaussian(2.0, 0.1, 4, 1000, 101)
    groups = GroupedGaussian(2.0, 0.1, 4)
    in_groups = dataclasses.replace(SGD, mechanism=DpSgdPlan(1.0, 2.0, draw=Groups(8)))
    assert said(poisson).startswith("derived from")
    assert said(groups, plan=in_groups).startswith("by another")
    for mixed in ([poisson, cut], [cut, BandedGaussian(2.0, 0.4, 4, 4)]):
        assert said(*mixed) == "is not covered"
    # The steps of the other run hold for no replaced row at this epsilon.
    assert said(poisson, groups, plan=in_groups) == "is not covered"


def test_what_an_earlier_run_released_limits_the_claim_to_the_weights() -> None:
    earlier = dataclasses.replace(SAFE, released=("training_loss",))
    statement = after(earlier, released=("grad_norm",))
    assert statement.status == "proven_weights_only"
    name = "training_loss (by the earlier run aaaaaaaa)"
    assert f"does not cover grad_norm, {name}, released without noise" in statement.sentence()
    assert name in statement.status_reason
    assert f"{name}: released without noise at the user's request" in statement.not_covered
    assert statement.to_dict()["released_without_noise"] == ["grad_norm", "training_loss"]


def test_planted_releases_of_earlier_runs_left_out_are_seen(monkeypatch) -> None:
    monkeypatch.setattr(
        statement_module.wording, "released_in_words", lambda facts: list(facts.released)
    )
    assert after(dataclasses.replace(SAFE, released=("training_loss",))).status == "proven"


def test_what_an_earlier_run_did_is_said() -> None:
    statement = after(SAFE, dataclasses.replace(SAFE, run_id="c" * 32, insecure_seed=True))
    assert (statement.status, statement.epsilon) == ("not_private", None)
    said = "of the earlier run cccccccc on the same rows came from a fixed seed"
    assert said in statement.sentence()
    lines = after(dataclasses.replace(SAFE, model_selection=True)).not_covered
    selected = "used in an earlier run on the same rows, and not accounted for"
    assert any("model selection" in line and selected in line for line in lines)
    refuted = after(dataclasses.replace(SAFE, refuted=True))
    assert (refuted.status, refuted.epsilon) == ("not_private", None)
    assert "an audit refuted what the ledger gives for the earlier run aaaa" in refuted.sentence()
    own = statement_of(SGD, refuted=True)  # whatever became of the audit
    assert (own.status, own.epsilon) == ("not_private", None)
    unknown = after(dataclasses.replace(SAFE, unit=NONE))  # a mechanism for which no bound is known
    assert (unknown.status, unknown.epsilon) == ("not_established", None)
    assert "no bound is known for the earlier run aaaaaaaa" in unknown.sentence()
    kept = after(dataclasses.replace(SAFE, conditions=("whether it rained",))).not_covered
    assert kept.count("whether it rained") == 1


def test_a_mechanism_for_which_no_bound_is_known_hands_on_no_unit(monkeypatch) -> None:
    """Also where its events and its unit are ordinary, as one from outside hf_dp may have them."""
    evidence = Evidence(SGD, ledger_of(SGD), "b" * 32)
    assert earlier_runs(evidence)[0].unit == EXAMPLE and not evidence.no_epsilon
    monkeypatch.setattr(DpSgdPlan, "established", False)
    assert earlier_runs(evidence)[0].unit == NONE
    assert evidence.no_epsilon == "no bound is known for what ran"


def test_what_a_run_hands_on(tmp_path) -> None:
    """That an audit refuted it, that no bound is known, and what no record shows."""
    audit = AuditResult("gradients", 1000, 1000, 990, SGD.delta)
    for plan, facts, expected in (
        (SGD, {"audit": audit}, {"refuted": True}),
        (SGD, {"audit": dataclasses.replace(audit, correct=500)}, {}),
        (PUBLISHED, {}, {"unit": NONE, "relation": NONE}),
        (dataclasses.replace(SGD, mechanism=DpSgdPlan(1.0, 2.0, draw=Groups(8))), {}, {"conditions": (BY_PLACE,)}),
    ):  # fmt: skip
        evidence = made(tmp_path / str(len(list(tmp_path.iterdir()))), plan)
        stated = evidence.stating(statement_of(plan, evidence.ledger, **facts), Beside())
        (run,) = earlier_runs(stated)
        relation = plan.mechanism.relation
        assert run == dataclasses.replace(EarlierRun("b" * 32, EXAMPLE, relation), **expected)


def test_published_dp_fp_in_an_earlier_run_is_not_established() -> None:
    ledger = Ledger()
    ledger.append(PublishedForwardNoise(1.0, 0.1, 1, 4), "earlier run")
    ledger.append(SGD.event(4), "training")
    said = "an earlier run on the same rows, which it names, was trained by DP-FP"
    for claimed in ((NONE, NONE), (EXAMPLE, ZERO_OUT)):  # the events decide, whatever is claimed
        statement = statement_of(SGD, ledger, earlier=(EarlierRun("p" * 32, *claimed),))
        assert (statement.status, statement.epsilon) == ("not_established", None)
        assert said in statement.sentence()
        assert (statement.unit_code, statement.to_dict()["unit"]) == (NONE, NONE)
        assert statement.unit.startswith("none")
        assert statement.neighboring_relation.startswith("none")


@pytest.mark.parametrize("where", ["here", "earlier"])
def test_rows_that_are_chunks_are_said(where) -> None:
    earlier = dataclasses.replace(SAFE, rows_are_chunks=where == "earlier")
    statement = after(earlier, rows_are_chunks=where == "here")
    assert "each row is a chunk of a longer text, so a document of k chunks" in statement.unit
    assert "zero-out of one row (a chunk of a longer text) of the" in statement.sentence()
    assert statement.to_dict()["rows_are_chunks"] is True
    plain = after(SAFE)
    assert "chunk" not in plain.unit + plain.sentence() and "rows_are_chunks" not in plain.to_dict()
    no_labels = after(EarlierRun("f", FEATURES, RECORD_ZERO_OUT, rows_are_chunks=True))
    words = "the text (or image) of one row (a chunk of a longer text), labels being public,"
    assert words in no_labels.sentence()


def test_a_ledger_with_earlier_runs_that_nobody_names_has_no_statement() -> None:
    said = "counts 1 releases of earlier runs; expected `earlier` to name"
    with pytest.raises(LedgerError, match=said):
        after()
    ledger = Ledger()
    ledger.append(RecordRelease(3.0, 1), "earlier run")
    with pytest.raises(LedgerError, match="expected `earlier` to name"):
        write("nowhere", Evidence(SGD, ledger, "r"))


def test_the_statement_survives_the_file_and_is_checked_against_it(tmp_path) -> None:
    earlier = (
        EarlierRun("f" * 32, FEATURES, RECORD_ZERO_OUT, released=("loss",), rows_are_chunks=True),
        SAFE,
    )
    statement = after(*earlier)
    ledger = statement.ledger
    made = Evidence(SGD, ledger, "r", Weaknesses(earlier=earlier))
    path = write(tmp_path, made.stating(statement, Beside()))
    evidence = read(path)
    assert evidence.weaknesses.earlier == earlier
    assert evidence.restated() == statement
    assert disagreements(evidence) == []


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        # it says more than its earlier runs
        (lambda plan, run: run.update(unit="example"), "unit is stated as"),
        (lambda plan, run: run.update(relation="zero_out"), "neighboring_relation is stated as"),
        (lambda plan, run: run.update(released=[]), "status is stated as"),
        (lambda plan, run: run.update(insecure_seed=True), "status is stated as"),
        (lambda plan, run: run.update(rows_are_chunks=False), "rows_are_chunks is stated as"),
        # it does not name them
        (lambda plan, run: plan.update(earlier=[]), "expected `earlier` to name these runs"),
        (lambda plan, run: plan.update(earlier={}), "`earlier` to be a list"),
        (lambda plan, run: run.update(unit="nation"), "`unit` to be one of"),
        (lambda plan, run: run.pop("insecure_seed"), "missing .'insecure_seed'"),
        (lambda plan, run: plan.pop("earlier"), "missing .'earlier'"),
        (lambda plan, run: plan.update(rows_are_chunks="no"), "`rows_are_chunks` to be True or"),
    ],
)
def test_edits_of_what_earlier_runs_claim_are_found(edit, message, tmp_path) -> None:
    test_the_statement_survives_the_file_and_is_checked_against_it(tmp_path)
    path = tmp_path / "privacy.json"
    rewrite(path, lambda data: edit(data["plan"], data["plan"]["earlier"][0]))
    assert re.search(message, problems(path)), problems(path)
