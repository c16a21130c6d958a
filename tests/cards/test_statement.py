"""The statement says what the ledger proves, rounded up, and says what it does not cover."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from statements import FACTS, SMALL, SST2, N, ledger_of, statement_of

from hf_dp.accounting import ACCOUNTANTS, Gaussian, Ledger, PoissonSampledGaussian, accountants
from hf_dp.accounting.accountants import ABOVE_A_BOUND, Answer, compare, table
from hf_dp.cards.card import render_card
from hf_dp.cards.details import CardDetails
from hf_dp.cli.main import main
from hf_dp.errors import AccountingRangeError, InvalidArgumentError, LedgerError
from hf_dp.plans import DpSgdPlan, PrivacyPlan
from hf_dp.statement import statement as statement_module
from hf_dp.statement.facts import EarlierRun, RunFacts, Weaknesses, seen_in_pretraining
from hf_dp.statement.statement import PrivacyStatement
from hf_dp.statement.wording import (
    NOT_PRIVATE,
    PROVEN,
    PROVEN_WEIGHTS_ONLY,
    delta_text,
    epsilon_text,
)


def by_accountant(statement: PrivacyStatement) -> dict[str, Answer]:
    return {row.accountant: row for row in statement.epsilons}


@pytest.fixture(scope="module")
def sst2() -> PrivacyStatement:
    return statement_of(SST2)


def test_sst2_numbers(sst2: PrivacyStatement) -> None:
    rows = by_accountant(sst2)
    assert list(rows) == ACCOUNTANTS
    # Independent values: PLD 2.410, RDP 3, PRV estimate 2.410 by other programs, bounds
    # up to slack above.
    assert 2.410 <= sst2.epsilon <= 2.412
    assert rows["pld"].epsilon.value == sst2.epsilon
    assert rows["rdp"].epsilon.value == 3.0
    assert rows["prv"].epsilon.estimate == 2.41
    assert 2.41 < rows["prv"].epsilon.value < 2.43
    kinds = [rows[name].epsilon.kind for name in ACCOUNTANTS]
    assert kinds == ["bound", "bound", "bound", "estimate"]
    assert rows["gdp_clt"].epsilon.value < 2.41
    assert sst2.status == PROVEN
    assert (sst2.accountant, sst2.accountant_note) == ("pld", "")
    assert sst2.sentence().startswith(
        f"The released weights are ({sst2.epsilon:.3f}, 7.425e-06)-differentially private with "
        "respect to zero-out of one row"
    )
    assert "gdp_clt  1.5" in str(sst2)
    assert "estimate" in str(sst2)
    for row in sst2.epsilons:  # what is printed is never below the true value
        exact = sst2.ledger.epsilon(SST2.delta, row.accountant).value
        assert 0 <= row.epsilon.value - exact < 1e-3
        assert float(epsilon_text(row.epsilon.value)) == row.epsilon.value


@pytest.mark.parametrize(
    ("delta", "text"),
    [
        (1e-5, "1e-05"),
        (1 / (2 * N), "7.425e-06"),
        (9.99991e-6, "1e-05"),
        (0.00012345001, "0.0001235"),
        (1.1e-10, "1.1e-10"),
    ],
)
def test_delta_is_printed_rounded_up(delta: float, text: str) -> None:
    assert delta_text(delta) == text
    assert float(text) >= delta


def test_steps_mechanism_and_rates_come_from_the_ledger_not_the_plan() -> None:
    ledger = Ledger()
    ledger.append(PoissonSampledGaussian(3.0, 0.05, 2), "selection")
    ledger.append(SMALL.event(4), "training")
    statement = statement_of(ledger=ledger)
    assert statement.steps == 4
    assert statement.noise_multipliers == (3.0, 2.0)
    assert statement.sample_rates == (0.05, 0.1)
    assert [entry.purpose for entry in statement.ledger.entries] == ["selection", "training"]
    assert statement.epsilon == ledger.epsilon(SMALL.delta, "pld").rounded_up()
    assert "2 noisy releases to choose what trains, 4 steps" in statement.sentence()


def test_zero_steps_cost_nothing_and_say_so() -> None:
    statement = statement_of(ledger=Ledger())
    assert (statement.epsilon, statement.steps, statement.status) == (0.0, 0, PROVEN)
    assert "(0, 0.0001)" in statement.sentence()
    assert "no step on the training set has run" in statement.sentence()


def test_an_insecure_seed_gives_no_epsilon_anywhere() -> None:
    statement = statement_of(insecure_seed=True)
    assert (statement.status, statement.epsilon, statement.proven) == (NOT_PRIVATE, None, False)
    assert all(row.epsilon is None for row in statement.epsilons)
    assert statement.sentence().startswith("This run is NOT private: ")
    assert "seed" in statement.status_reason
    true_value = ledger_of(SMALL).epsilon(SMALL.delta).rounded_up()
    assert str(true_value) not in str(statement) + json.dumps(statement.to_dict())


def test_a_step_without_noise_is_not_private() -> None:
    ledger = ledger_of(SMALL, 3)
    ledger.append(Gaussian(0.0, 1), "training")
    statement = statement_of(ledger=ledger)
    assert (statement.status, statement.epsilon) == (NOT_PRIVATE, None)
    assert "1 of 4 steps ran without noise" in statement.sentence()


@pytest.mark.parametrize(
    ("released", "name"),
    [
        (("training_loss", "grad_norm"), "training_loss, grad_norm"),
        (("evaluation_on_training_rows",), "evaluation_on_training_rows (metrics computed on training rows)"),
    ],
)  # fmt: skip
def test_a_release_limits_the_claim_to_the_weights(released: tuple[str, ...], name: str) -> None:
    statement = statement_of(released=released)
    assert statement.status == PROVEN_WEIGHTS_ONLY and statement.proven
    assert "weights only" in statement.status_reason
    assert "The released weights alone" in statement.sentence()
    assert f"this does not cover {name}, released without noise." in statement.sentence()
    listed = [line for line in statement.not_covered if "without noise at the user's" in line]
    assert [line.split(":")[0] for line in listed] == name.split(", ")


@pytest.mark.parametrize(
    ("plan", "facts"),
    [
        ({"privacy_unit": "user"}, {}),
        ({"neighboring_relation": "add_remove"}, {}),
        ({}, {"released": "training_loss"}),
        ({}, {"rows_are_chunks": None}),
        ({}, {"evaluation_compared": 1}),
        ({}, {"earlier": ["first"]}),
    ],
)
def test_what_no_statement_is_known_for_is_refused(plan, facts):
    with pytest.raises(InvalidArgumentError, match=next(iter({**plan, **facts}))):
        statement_of(dataclasses.replace(SMALL, **plan), Ledger(), **facts)


NOT_COVERED = (
    "evaluation data; model selection on evaluation data; hyperparameter tuning; other runs on the "
    "same data; rows of it may occur in the training data; rows that depend on other rows; "
    "collators with state that cannot be copied; where a run broke off; restored from a backup "
    "or trained on in two copies; label set; pretraining data; number of rows; running time; "
    "floating-point; random generators"
)


def test_what_is_not_covered_is_listed() -> None:
    text = "\n".join(statement_of(ledger=Ledger()).not_covered)
    for item in NOT_COVERED.split("; "):
        assert item in text
    assert "not used by this run" in text
    used = statement_of(ledger=Ledger(), model_selection=True).not_covered
    assert any("model selection" in item and "used in this run" in item for item in used)


def test_evaluation_data_that_was_not_compared_is_said() -> None:
    def line(**changes: object) -> str:
        items = statement_of(ledger=Ledger(), **changes).not_covered
        (found,) = [item for item in items if item.startswith("evaluation data")]
        return found

    assert "not checked" not in line()
    said = "not checked for every evaluation set of this run: a set that has no column in common"
    assert said in line(evaluation_compared=False)
    earlier = EarlierRun("first", "example", "zero_out", evaluation_compared=False)
    assert "was not checked for every evaluation set of an earlier run" in line(earlier=(earlier,))


def test_the_same_lines_stand_in_every_statement() -> None:
    """What weakens a run adds lines, or words to them; it takes none away."""
    weak = {"model_selection": True, "rows_are_chunks": True, "evaluation_compared": False}
    base, other = (
        statement_of(ledger=Ledger(), **facts).not_covered
        for facts in ({}, {"released": ("grad_norm",), **weak})
    )
    assert {item.split(":")[0] for item in base} < {item.split(":")[0] for item in other}
    assert len(other) == len(base) + 1


def test_an_estimate_is_never_the_headline() -> None:
    statement = statement_of(dataclasses.replace(SMALL, accountant="gdp_clt"))
    rows = by_accountant(statement)
    assert statement.epsilon == min(rows[name].epsilon.value for name in ("pld", "rdp", "prv"))
    assert statement.accountant != "gdp_clt"
    assert "estimate, not a bound" in statement.accountant_note
    assert statement.accountant_note in str(statement)


def test_an_accountant_out_of_range_is_replaced_and_that_is_said() -> None:
    # below what pld and prv are known to be right at
    statement = statement_of(dataclasses.replace(SMALL, delta=1e-12))
    rows = by_accountant(statement)
    assert rows["pld"].epsilon is None
    assert "delta" in rows["pld"].note
    assert (statement.accountant, statement.epsilon) == ("rdp", rows["rdp"].epsilon.value)
    assert "rdp" in statement.accountant_note
    assert "pld" in statement.accountant_note
    # Why the one asked for says nothing is said whole, of the others in a few words.
    assert rows["pld"].note in statement.accountant_note
    card = render_card(statement, CardDetails())
    assert "| prv | - | outside its range |" in card and "| pld | - | outside its range |" in card
    assert "prv      -        outside its range" in str(statement)
    assert f"{statement}{card}".count("is known to be right for") == 2


def test_without_any_bound_nothing_is_claimed() -> None:
    with pytest.raises(AccountingRangeError, match="nothing is claimed"):
        statement_of(dataclasses.replace(SMALL, delta=1e-200))


def test_facts_survive_json_without_what_the_plan_has_already() -> None:
    weak = statement_of(released=("training_loss",)).facts
    made = json.loads(json.dumps(weak.made(), allow_nan=False))
    assert "released" not in made
    weaknesses = Weaknesses(released=("training_loss",))
    assert RunFacts.of(weaknesses, made) == weak
    for edit in ({"extra": 1}, {"audit": 3}):
        with pytest.raises(LedgerError, match="cannot be read"):
            RunFacts.of(weaknesses, {**made, **edit})


def test_the_statement_is_pure(sst2: PrivacyStatement) -> None:
    ledger = ledger_of(SST2)
    before = ledger.to_list()
    assert PrivacyStatement.from_ledger(SST2, ledger, FACTS) == sst2
    assert ledger.to_list() == before
    assert math.isfinite(sst2.epsilon)


def test_the_page_of_pitfalls_says_how_much_each_matters(capsys):
    page = Path(statement_module.__file__).with_name("README.md").read_text()
    rows = [line.split("|")[1:4] for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 9
    assert {row[1].strip() for row in rows} == {"high", "medium", "low"}
    assert all(row[2].strip() for row in rows)
    last = statement_of(ledger=Ledger()).not_covered[-1]
    assert "hf-dp verify --pitfalls" in last
    with pytest.raises(SystemExit) as ended:
        main(["verify", "--pitfalls"])
    assert not ended.value.code and "# Pitfalls" in capsys.readouterr().out


# -- an estimate above a bound is shown nowhere: the bound says more --

DELTA = 1e-5
# Little noise and a large sample rate: GDP-CLT is above PLD. The other is a usual run.
EVENTS = {PoissonSampledGaussian(0.5, 0.9, 1): True, PoissonSampledGaussian(1.0, 0.02, 100): False}


def above(answers):
    """The estimates above the least of the bounds, point estimates beside a bound, too."""
    found = [answer.epsilon for answer in answers if answer.epsilon is not None]
    bound = min(value.value for value in found if value.kind == "bound")
    shown = [value.value for value in found if value.kind == "estimate"]
    shown += [value.estimate for value in found if value.estimate is not None]
    return [value for value in shown if value > bound]


@pytest.mark.parametrize(("event", "is_above"), EVENTS.items())
def test_no_estimate_stands_above_a_bound(event, is_above, monkeypatch):
    answers = compare(event, DELTA)
    assert above(answers) == []
    assert ("gdp_clt    -         not computed" in table(answers, DELTA)) == is_above
    monkeypatch.setattr(accountants, "_without_estimate_above", lambda bound, answer: answer)
    assert bool(above(compare(event, DELTA))) == is_above  # as planted


def test_a_statement_and_its_card_show_none():
    plan = PrivacyPlan(40, 36.0, 1, 0.0125, DpSgdPlan(0.1, 0.5))
    statement = statement_of(plan)
    (row,) = [row for row in statement.epsilons if row.epsilon is None]
    assert (row.accountant, row.note) == ("gdp_clt", ABOVE_A_BOUND)
    assert "estimate, not a guarantee" not in render_card(statement, CardDetails())


def test_an_estimate_that_is_asked_for_alone_is_given():
    (answer,) = compare(next(iter(EVENTS)), DELTA, [ACCOUNTANTS[-1]])
    assert answer.epsilon is not None and answer.epsilon.kind == "estimate"


# -- the warning that the base has seen the private data before --


@pytest.mark.parametrize(
    ("dataset", "sources", "seen"),
    [
        ("nyu-mll/glue/sst2", ["wikipedia", "SST-2"], ["SST-2"]),
        ("sst2", ["glue:sst2", "qqp"], ["glue:sst2"]),
        ("nyu-mll/glue/qqp", ["Quora", "squad"], ["Quora"]),
        ("quora", ["qqp"], ["qqp"]),
        ("qnli", ["rajpurkar/SQuAD"], ["rajpurkar/SQuAD"]),
        ("mnli", ["AllNLI"], ["AllNLI"]),
        ("sst2", ["qqp", "qnli", "dart"], []),
        ("nyu-mll/glue/sst2", ["glue"], ["glue"]),
        ("nyu-mll/glue/sst2", ["nyu-mll/glue"], ["nyu-mll/glue"]),
        ("qnli", ["squad_v2"], ["squad_v2"]),
        ("nyu-mll/glue/mnli_matched", ["mnli"], ["mnli"]),
        ("stanfordnlp/sst2/default", ["sst2"], ["sst2"]),
        ("SST-2 (train)", ["sst2"], ["sst2"]),
        ("private", ["private"], []),
        ("private", ["qqp"], []),
        (None, ["qqp"], []),
        ("sst2", [], []),
    ],
)
def test_names_are_compared_by_what_they_name(dataset, sources, seen):
    assert seen_in_pretraining(dataset, sources) == seen
