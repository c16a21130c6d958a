"""What a private search demands of evaluation sets: no training row, as a comparison shows.

The bound of a search holds only if the score that selects a run reads no training row. A few equal
rows, of which one run merely warns, would therefore make its statement false.
"""

from __future__ import annotations

from typing import Any

from hf_dp.errors import UnsupportedArgumentError
from hf_dp.overlap.compare import Overlap, TrainingRows, each_named, in_words
from hf_dp.overlap.users import TrainingUsers
from hf_dp.plans.best_of_runs import ARGUMENT

_WHY = f"With {ARGUMENT}, the score that selects a run must read no training row"


def refuse_any_training_row(evaluation: Any, training: TrainingRows) -> None:
    """Refuse evaluation sets with a row equal to a training row, and those that cannot be compared.

    Args: evaluation: one set, a mapping of names to sets, each judged by itself, or None.

    Raises: UnsupportedArgumentError; it names the set, if it has a name, but tells no count.
    """
    for name, each in each_named(evaluation):
        _judge(in_words(name), training.compare(each))


def _judge(which: str, overlap: Overlap) -> None:
    if overlap.derived:
        raise UnsupportedArgumentError(
            f"{_WHY}, but the {which} is made from rows of the training set. Pass a held-out set."
        )
    if overlap.equal:
        raise UnsupportedArgumentError(
            f"{_WHY}, but the {which} holds rows equal to training rows. Remove from it each row "
            f"whose inputs equal those of a training row, or leave {ARGUMENT} out."
        )
    if not overlap.comparable:
        raise UnsupportedArgumentError(
            f"{_WHY}, but the {which} cannot be compared with the training rows: they have no "
            "input column in common, or rows differ each time they are read. Give both sets the "
            f"same columns, without random transforms, or leave {ARGUMENT} out."
        )


def refuse_any_training_user(evaluation: Any, users: TrainingUsers) -> None:
    """Refuse evaluation sets with a row of a training user, and those that do not say whose rows
    they hold.

    Args: evaluation: one set, a mapping of names to sets, or None.

    Raises: UnsupportedArgumentError; it names the set, if it has a name, but tells no count.
    """
    column = users.table.column
    for name, each in each_named(evaluation):
        shared = users.shared(each)
        if shared is None:
            raise UnsupportedArgumentError(
                f"{_WHY} or {users.name}, but the {in_words(name)} does not say whose its rows "
                f"are. Keep the column {column!r} in it, or leave {ARGUMENT} out."
            )
        if shared:
            raise UnsupportedArgumentError(
                f"{_WHY} or {users.name}, but the {in_words(name)} has rows of the same values in "
                f"{column!r}. Split by {column!r}, or leave {ARGUMENT} out."
            )
