"""The words and numbers of a statement, whatever the mechanism. No program reads the words: what is
compared are codes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import ROUND_CEILING, Decimal

from hf_dp.accounting import BOUNDS, Epsilon, GroupedGaussian, Ledger, round_up
from hf_dp.accounting.accountants import Answer, compare
from hf_dp.accounting.composition import compose
from hf_dp.errors import AccountingRangeError
from hf_dp.plans import units
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.statement.facts import EVALUATION_ON_TRAINING_ROWS, OTHER_ROWS, PUBLIC_ROWS, RunFacts

EPSILON_DIGITS = 3  # decimals of a printed epsilon
DELTA_DIGITS = 4  # significant digits of a printed delta


def epsilon_text(epsilon: float | None) -> str:
    """Return the text of an epsilon that is already rounded up; "none" for None."""
    if epsilon is None:
        return "none"
    return "0" if epsilon == 0 else f"{epsilon:.{EPSILON_DIGITS}f}"


def delta_text(delta: float) -> str:
    """Return delta rounded up to four significant digits: "(epsilon, delta)-private" stays true."""
    exact = Decimal(repr(float(delta)))
    if exact == 0:
        return "0"
    last_digit = Decimal(1).scaleb(exact.adjusted() - DELTA_DIGITS + 1)
    return f"{float(exact.quantize(last_digit, ROUND_CEILING)):g}"


def results_of(ledger: Ledger, delta: float, accountants: Sequence[str]) -> tuple[Answer, ...]:
    """Return what each accountant says about a ledger, rounded up to three decimals, or why it says
    nothing."""
    return tuple(map(_rounded, compare(ledger.events, delta, accountants)))


def _rounded(answer: Answer) -> Answer:
    found = answer.epsilon
    if found is None:
        return answer
    if not math.isfinite(found.value):
        return Answer(answer.accountant, None, "no finite epsilon")
    point = None if found.estimate is None else round_up(found.estimate, EPSILON_DIGITS)
    return replace(answer, epsilon=Epsilon(found.rounded_up(EPSILON_DIGITS), found.kind, point))


def headline(rows: tuple[Answer, ...], wanted: str) -> tuple[str, float, str]:
    """Return the accountant of the claim, its epsilon and, if it is not the one asked for, why.

    Raises: AccountingRangeError when no accountant gives an upper bound."""
    bounds = {
        row.accountant: row.epsilon.value
        for row in rows
        if row.epsilon is not None and row.accountant in BOUNDS
    }
    if wanted in bounds:
        return wanted, bounds[wanted], ""
    if not bounds:
        notes = " ".join(f"{row.accountant}: {row.note}" for row in rows if row.note)
        raise AccountingRangeError(
            f"No accountant gives an upper bound for this run, so nothing is claimed. {notes}"
        )
    best = min(bounds, key=bounds.__getitem__)
    why = next(
        (row.note for row in rows if row.accountant == wanted and row.note),
        "it is an estimate, not a bound.",
    )
    note = f"The headline is {best}'s bound, not that of {wanted}, the accountant asked for: {why}"
    return best, bounds[best], note


def point_estimate(found: Epsilon) -> str:
    """Return the point estimate beside a bound, in words; empty without one."""
    return "" if found.estimate is None else f" (point estimate {epsilon_text(found.estimate)})"


def line(row: Answer) -> str:
    """Return a result as one line of a terminal."""
    found = row.epsilon
    if found is None:
        return f"{row.accountant:<8} -        {row.short or row.note}"
    epsilon = epsilon_text(found.value)
    return f"{row.accountant:<8} {epsilon:<8} {found.kind}{point_estimate(found)}"


RUNNING = "running"
PROVEN = "proven"
PROVEN_WEIGHTS_ONLY = "proven_weights_only"
NOT_PRIVATE = "not_private"
NOT_ESTABLISHED = "not_established"
STATUSES = {
    RUNNING: "running",
    PROVEN: "proven",
    PROVEN_WEIGHTS_ONLY: "proven for the weights only",
    NOT_PRIVATE: "not private",
    NOT_ESTABLISHED: "not established",
}

_IN_ROWS = "a person or text that appears in k rows"
_K_FOLD = "is protected k-fold weaker (k times epsilon, and delta times k exp((k - 1) epsilon))"
_UNITS = {
    units.EXAMPLE: "one row of the training set",
    units.FEATURES: (
        "the text (or image) of one row of the training set, whose label is stated as public"
    ),
}
_VECTOR_RELATION = (
    "zero-out: the contribution of one row is replaced by nothing (its released vector holds noise "
    "alone), while the number of rows is public. Adding or removing a row is not covered, because "
    "one vector is released for each row; replacing a row by another moves its vector twice as far"
)
_RELATIONS = {
    units.ZERO_OUT: (
        "zero-out: the contribution of one {one} is replaced by nothing, while the number of {all} "
        "is public. {cost}"
    ),
    units.RECORD_ZERO_OUT: _VECTOR_RELATION,
    units.NONE: "none: nothing is established for any relation",
}
_AS_ADDED = (
    "The value of epsilon is the same as for adding or removing one {one}, but that relation is "
    "not claimed, because sample rate, steps, delta and divisor are derived from the number of "
    "{all}"
)
_IN_A_GROUP = (
    "Its group then has a different gradient, of any direction, and epsilon covers any such move; "
    "so it also holds for a row that is replaced by another. Adding or removing a row is not "
    "covered, because others would move into other groups"
)
_NOT_ADDED = "Adding or removing one {one} is not covered"
_RELEASES = {
    EVALUATION_ON_TRAINING_ROWS: " (metrics computed on training rows)",
    "clipped_gradient_norm": " (norms of clipped gradients before noise)",
}
COVERED = (
    "the released weights, every checkpoint of this run, optimizer state, and whatever is computed "
    "from them without the training set"
)
PITFALLS = (
    "what holds for every run: rows that depend on other rows, collators with state that cannot be "
    "copied, an output folder restored from a backup or trained on in two copies, where a run "
    "broke off, running time, attacks on floating-point numbers and random generators (how much "
    "each matters, and what to do: hf-dp verify --pitfalls)"
)


def one_user(users: units.Users) -> str:
    """Say what one user is."""
    return f"one {users.name} (all rows with one value in the column {users.column!r})"


def unit_in_words(unit: str, facts: RunFacts, users: units.Users | None) -> str:
    """Say what is protected, by its code in :mod:`hf_dp.plans.units`, and how much weaker the
    protection is of a person or text in several rows."""
    if unit == units.NONE:
        return "none: nothing is established for any unit"
    if unit == units.USER and users is not None:
        return (
            f"{one_user(users)}, however many rows that are; what appears in the rows of several, "
            f"k of them, {_K_FOLD}"
        )
    who = _IN_ROWS
    if any(run.rows_are_chunks for run in facts.everywhere):
        who = f"each row is a chunk of a longer text, so a document of k chunks, like {_IN_ROWS},"
    return f"{_UNITS[unit]}; {who} {_K_FOLD}"


def relation_in_words(relation: str, plan: PrivacyPlan, ledger: Ledger) -> str:
    """Say against which change a row, or user, is protected, by its code in
    :mod:`hf_dp.plans.units`, and what holds for others of all that ran."""
    users = plan.users
    one, every = ("row", "rows") if users is None else (users.name, f"units (each a {users.name})")
    events = ledger.events or plan.events()
    cost = _NOT_ADDED
    if all(isinstance(event, GroupedGaussian) for event in events):
        cost = _IN_A_GROUP
    elif all("add_remove" in cls.relations for cls in compose(events).restricted):
        cost = _AS_ADDED
    return _RELATIONS[relation].format(one=one, all=every, cost=cost.format(one=one, all=every))


def released_in_words(facts: RunFacts) -> list[str]:
    """List what was released without noise, in this run and in the earlier runs that it names."""
    by = [("", facts), *((f" (by {run.name})", run) for run in facts.earlier)]
    return [f"{name}{_RELEASES.get(name, '')}{whose}" for whose, run in by for name in run.released]


def not_covered(facts: RunFacts, plan: PrivacyPlan) -> Iterator[str]:
    """Yield what epsilon says nothing about: first what depends on the run."""
    for name in released_in_words(facts):
        yield f"{name}: released without noise at the user's request"
    yield from _public_labels(facts, plan)
    yield from _other_training(facts)
    yield _evaluation(facts)
    if facts.model_selection:
        selected = "used in this run"
    elif any(run.model_selection for run in facts.earlier):
        selected = "used in an earlier run on the same rows"
    else:
        selected = "not used by this run's trainer"
    yield (
        f"model selection on evaluation data (best checkpoint, early stopping): {selected}, and "
        "not accounted for"
    )
    if any(run.experts for run in facts.everywhere):
        yield (
            "experts chosen by rounding: where two of a token's scores are almost equal, the rows "
            "beside it may decide which experts it gets, and so change what its row adds (seldom "
            "in float32; never where a physical batch is one row)"
        )
    if any(run.public_teacher for run in facts.everywhere):
        yield (
            "what another model was trained on whose outputs are in the losses, such as a teacher: "
            "the user states that it is public. If it saw the training set, this epsilon is wrong"
        )
    if any(run.public_adapter for run in facts.everywhere):
        yield (
            "the data from which an adapter's initial weights, or its selection of what trains, "
            "were computed: the user states that it is public. If it was the training set, this "
            "epsilon is wrong"
        )
    yield plan.words.tuning
    yield from dict.fromkeys(
        (*plan.words.conditions, *(each for run in facts.earlier for each in run.conditions))
    )
    yield "tokenizer, vocabulary or label set, if built from the training set"
    yield "pretraining data of the base model"
    users, counted = plan.users, "rows"
    if users is not None:
        counted = f"units (each a {users.name}){' and of the rows kept of them' * users.by_row}"
    yield (
        f"the number of {counted}, which is stated as public (with what is derived from it: sample "
        "rate, steps, delta, divisor)"
    )
    if users is not None:
        yield (
            f"whether the column {users.column!r} is right: a {users.name} under two values counts "
            "as two, and each is protected alone"
        )
    yield PITFALLS


def _public_labels(facts: RunFacts, plan: PrivacyPlan) -> Iterator[str]:
    text = "the labels of the training rows, which are stated as public: they"
    names = [run.name for run in facts.earlier if run.unit not in (units.EXAMPLE, units.USER)]
    if plan.mechanism.unit != units.EXAMPLE:
        yield f"{text} enter the loss as they are"
    elif names:
        yield f"{text} entered the loss of {', '.join(names)} as they are"


def _other_training(facts: RunFacts) -> Iterator[str]:
    said = {run.other_training for run in facts.everywhere}
    text = "rows of other training: steps that are not counted here trained these weights, too"
    if PUBLIC_ROWS in said:
        yield f"{text}, on rows that the user states to be public, or on none"
    if OTHER_ROWS in said:
        yield (
            f"{text}, on rows that the user states to be others than the training set's. This "
            "statement is not about those rows, and they may need one of their own"
        )


def _evaluation(facts: RunFacts) -> str:
    text = (
        "evaluation data: metrics and choices made with it are not noised, and its rows are not "
        "protected; rows of it may occur in the training data, and are not protected there either"
    )
    where = [
        "this run" if run is facts else "an earlier run"
        for run in facts.everywhere
        if not run.evaluation_compared
    ]
    if not where:
        return text
    return (
        f"{text}. Whether any do was not checked for every evaluation set of {where[0]}: a set "
        "that has no column in common with the training rows, stands beside rows that come as a "
        "stream, may be chosen by a trainer class of the user's own, or was used before hf_dp "
        "compared them, was not compared with them"
    )
