"""The words of a statement, whatever the mechanism. No program reads them: what is compared are
codes."""

from __future__ import annotations

from collections.abc import Iterator

from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.plans.units import (
    EXAMPLE,
    FEATURES,
    NONE,
    RECORD_ZERO_OUT,
    USER,
    ZERO_OUT,
    Users,
)
from hf_dp.statement.facts import EVALUATION_ON_TRAINING_ROWS, OTHER_ROWS, PUBLIC_ROWS, RunFacts

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
    EXAMPLE: "one row of the training set",
    FEATURES: "the text (or image) of one row of the training set, whose label is stated as public",
}
_VECTOR_RELATION = (
    "zero-out: the contribution of one row is replaced by nothing (its released vector holds noise "
    "alone), while the number of rows is public. Adding or removing a row is not covered, because "
    "one vector is released for each row; replacing a row by another moves its vector twice as far"
)
_RELATIONS = {
    ZERO_OUT: (
        "zero-out: the contribution of one {one} is replaced by nothing, while the number of {all} "
        "is public. The value of epsilon is the same as for adding or removing one {one}, but that "
        "relation is not claimed, because sample rate, steps, delta and divisor are derived from "
        "the number of {all}"
    ),
    RECORD_ZERO_OUT: _VECTOR_RELATION,
    NONE: "none: nothing is established for any relation",
}
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
    "copied, a folder that was put back or copied as a whole, where a run broke off, running time, "
    "attacks on floating-point numbers and random generators (how much each matters, and what to "
    "do: hf-dp verify --pitfalls)"
)


def one_user(users: Users) -> str:
    """Say what one user is."""
    return f"one {users.name} (all rows with one value in the column {users.column!r})"


def unit_in_words(unit: str, facts: RunFacts, users: Users | None) -> str:
    """Say what is protected, by its code in :mod:`hf_dp.plans.units`.

    Also say how much weaker the protection is of a person or text in several rows.
    """
    if unit == NONE:
        return "none: nothing is established for any unit"
    if unit == USER and users is not None:
        return (
            f"{one_user(users)}, however many rows that are; what appears in the rows of several, "
            f"k of them, {_K_FOLD}"
        )
    who = _IN_ROWS
    if any(run.rows_are_chunks for run in facts.everywhere):
        who = f"each row is a chunk of a longer text, so a document of k chunks, like {_IN_ROWS},"
    return f"{_UNITS[unit]}; {who} {_K_FOLD}"


def relation_in_words(relation: str, users: Users | None) -> str:
    """Say against which change a row, or user, is protected, by its code in
    :mod:`hf_dp.plans.units`."""
    one, every = ("row", "rows") if users is None else (users.name, f"units (each a {users.name})")
    return _RELATIONS[relation].format(one=one, all=every)


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
    yield plan.words.tuning
    yield from plan.words.conditions
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
    names = [run.name for run in facts.earlier if run.unit not in (EXAMPLE, USER)]
    if plan.mechanism.unit != EXAMPLE:
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
        "that has no column in common with the training rows, or was used before hf_dp compared "
        "them, was not compared with them"
    )
