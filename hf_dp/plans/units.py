"""What a run protects, and against which change: codes, ordered from the strongest claim to the
weakest.

A plan carries the codes; :mod:`hf_dp.statement.wording` puts them into words.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hf_dp import _validate

NONE = "none"  # nothing is established

USER = "user"  # all rows that a column says are one user's
EXAMPLE = "example"  # a whole row, its label included
FEATURES = "features"  # a row without its label, which is public
UNITS = (USER, EXAMPLE, FEATURES, NONE)

ZERO_OUT = "zero_out"  # of a row's part in sums
RECORD_ZERO_OUT = "record_zero_out"  # and of a row's released vector
RELATIONS = (ZERO_OUT, RECORD_ZERO_OUT, NONE)

# What a user may ask for; other units and relations need samplers and accounting of their own.
PRIVACY_UNITS = (EXAMPLE, USER)
NEIGHBORING_RELATIONS = (ZERO_OUT,)

MEAN, TOTAL = "mean", "sum"
REDUCTIONS = (MEAN, TOTAL)
BY_USER, BY_ROW = "users", "examples"
SAMPLINGS = (BY_USER, BY_ROW)
MAX_ROWS = 10


@dataclass(frozen=True)
class Users:
    """Users as the privacy unit, by one of the two ways of Charles et al. 2024 (arXiv 2407.07737).

    Sampling "users", each step draws users, and a drawn user contributes one gradient, clipped
    once. Sampling "examples", each step draws rows, each clipped by itself; the accountant knows
    how many of them can be one user's.

    Args:
        column: the column whose values say whose a row is.
        name: what one of them is called in statements, for example "patient".
        max_rows: the most rows of a user that take part: of a drawn user, chosen at random in each
            draw; or of the rows that are drawn from, chosen once.
        reduction: whether a drawn user's gradient is the "mean" or the "sum" over those rows.
        sampling: "users" or "examples".
        num_rows: the rows that are drawn from with sampling "examples", at most ``max_rows`` of
            each user; stated as public.

    Raises: InvalidArgumentError.
    """

    column: str
    name: str = "user"
    max_rows: int = MAX_ROWS
    reduction: str = MEAN
    sampling: str = BY_USER
    num_rows: int | None = None

    def __post_init__(self) -> None:
        check_name("privacy_unit_column", self.column)
        check_name("privacy_unit_name", self.name)
        _validate.integer("max_rows_per_unit", self.max_rows, 1)
        _validate.one_of("unit_reduction", self.reduction, REDUCTIONS)
        _validate.one_of("unit_sampling", self.sampling, SAMPLINGS)
        if self.num_rows is not None:
            _validate.integer("num_rows", self.num_rows, 2)

    @property
    def by_row(self) -> bool:
        """Whether rows are drawn and clipped one by one."""
        return self.sampling == BY_ROW

    def scale(self, rows: int) -> float:
        """Return by what the losses of a user's ``rows`` rows are multiplied before they add up."""
        return 1 / rows if self.reduction == MEAN else 1.0


def check_name(argument: str, value: object) -> str:
    """Return a column's name, or what a user is called, which no reader takes for one row."""
    if not isinstance(value, str) or not value.strip() or "\n" in value:
        raise _validate.invalid(argument, value, "to be a word or a name, on one line")
    if argument == "privacy_unit_name" and value.strip().lower() in ("row", "example"):
        why = 'A card would take it for one row. Use "user", "patient" or the like.'
        raise _validate.invalid(argument, value, "to say whose the rows are", why)
    return value


def weakest_unit(units: Iterable[str]) -> str:
    """Return the unit that runs on the same rows protect together."""
    return max(units, key=UNITS.index)


def weakest_relation(relations: Iterable[str]) -> str:
    """Return the relation that holds for runs on the same rows together.

    Where labels are public in one of the runs, no label is replaced in any of them.
    """
    return max(relations, key=RELATIONS.index)
