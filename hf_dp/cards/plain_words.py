"""The guarantee for a reader who knows no differential privacy."""

from __future__ import annotations

import math

from hf_dp.cards.escaping import markdown
from hf_dp.plans.units import EXAMPLE
from hf_dp.statement.results import delta_text
from hf_dp.statement.statement import PrivacyStatement, observed
from hf_dp.statement.wording import NOT_ESTABLISHED, PROVEN_WEIGHTS_ONLY

FALSE_ALARMS = 0.01  # of 100 rows that were not used, one is taken for used
# A delta from which a card says something of it: 1 in 10,000.
LARGE_DELTA = 1e-4


def most_found(epsilon: float, delta: float, false_alarms: float = FALSE_ALARMS) -> float:
    """Return the largest share of used rows that any test recognizes.

    Of the rows that were not used it takes ``false_alarms`` for used. (epsilon, delta) bounds both
    kinds of error: ``found <= e^epsilon false + delta`` and ``1 - found >= e^-epsilon (1 - delta -
    false)`` (Wasserman and Zhou 2010; Kairouz, Oh and Viswanath 2015, theorem 2.1).
    """
    grown = min(epsilon, 50.0)  # beyond, the first bound is above 1 whatever delta is
    one = math.exp(grown) * false_alarms + delta
    other = 1 - math.exp(-epsilon) * max(0.0, 1 - delta - false_alarms)
    return min(1.0, one, other)


def in_short(statement: PrivacyStatement) -> list[str]:
    """Return, as Markdown, what is protected, against whom, by how much, and what is not."""
    if not statement.proven:
        return _without_a_guarantee(statement)
    plan, users = statement.plan, statement.plan.users
    row, count = "chunk of a text" if statement.rows_are_chunks else "row", plan.num_examples
    what = f"each single {row} of the training set ({count:,} rows)"
    knows, rows, several = "all other rows", "rows", "rows"
    if users is not None:
        name, knows, rows = markdown(users.name), "the rows of all others", "units"
        several = f"values in the column {markdown(repr(users.column))}"
        what = f"each single {name} in the training set, with all of its rows ({count:,} in all)"
    elif statement.unit_code != EXAMPLE:
        what = (
            f"the text (or image) of each single {row} of the training set, not its label "
            f"({count:,} rows)"
        )
    beside = ""
    if statement.status == PROVEN_WEIGHTS_ONLY:
        beside = ", but not what else was released"
    found = most_found(statement.epsilon or 0.0, statement.delta)
    strength = (
        f"**How strongly:** {_judged(found)}. {_guessed(_in_100(found), users is not None)} "
        "Without privacy they may find all."
    )
    if statement.delta >= LARGE_DELTA:
        strength += (
            f" A large delta: {markdown(delta_text(statement.delta))} is roughly the chance that "
            "all this fails. "
        )
        strength += (
            f"Of so few {rows} no model can be taught with a delta that is customary."
            if count < 1 / LARGE_DELTA
            else "Far less than 1 in 10,000 is customary."
        )
    return [
        f"**Protects** {what}: whether and how it was used for training. It holds against anyone "
        f"who has the weights{beside}, also if they know {knows} and how the model was trained.",
        strength,
        f"**Does not protect** a person with several {several} as much, nor what the base model "
        "learned before, nor evaluation data. The full list is below.",
    ]


def _without_a_guarantee(statement: PrivacyStatement) -> list[str]:
    why = (
        "the published analysis of this method does not hold for what ran (the reasons are below)"
        if statement.status == NOT_ESTABLISHED and not observed(statement.facts)
        else markdown(statement.status_reason)
    )
    return [
        "**Protects** nothing that anyone could rely on: treat these weights as if they had been "
        "trained without any privacy protection.",
        f"**Why:** {why}. The numbers below are for the record; no epsilon follows from them.",
    ]


def _guessed(found: str, users: bool) -> str:
    if users:
        which, wrong, used = "whose rows", "those whose were not", "those whose were"
    else:
        which, wrong, used = "which rows", "the rows that were not", "the rows that were"
    return (
        f"Suppose that somebody guesses {which} were used, and is wrong about 1 in 100 of {wrong}. "
        f"Then they find at most {found} in 100 of {used}."
    )


def _in_100(share: float) -> str:
    """Return a share in percent, rounded up, so that "at most" stays true."""
    digits = 0 if share < 0.9 else 2 if share < 0.9999 else 4
    return f"{min(100.0, math.ceil(share * 100 * 10**digits) / 10**digits):g}"


def _judged(found: float) -> str:
    if found <= 0.05:
        return "strongly"
    return "moderately" if found <= 0.5 else "weakly; by itself this promises little"
