"""An estimate above a bound is shown nowhere: the bound says more."""

from __future__ import annotations

import pytest
from statements import statement_of

from hf_dp.accounting import ACCOUNTANTS, PoissonSampledGaussian, accountants
from hf_dp.accounting.accountants import ABOVE_A_BOUND, compare
from hf_dp.cards.card import render_card
from hf_dp.cards.details import CardDetails
from hf_dp.cli.account import table
from hf_dp.plans import DpSgdPlan, PrivacyPlan

DELTA = 1e-5
# Little noise and a large sample rate: GDP-CLT is above PLD. The other is a usual run.
EVENTS = {
    PoissonSampledGaussian(0.5, 0.9, 1): True,
    PoissonSampledGaussian(1.0, 0.02, 100): False,
}


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
    (row,) = [row for row in statement.epsilons if row.kind is None]
    assert (row.accountant, row.note) == ("gdp_clt", ABOVE_A_BOUND)
    assert "estimate, not a guarantee" not in render_card(statement, CardDetails())


def test_an_estimate_that_is_asked_for_alone_is_given():
    (answer,) = compare(next(iter(EVENTS)), DELTA, [ACCOUNTANTS[-1]])
    assert answer.epsilon is not None and answer.epsilon.kind == "estimate"
