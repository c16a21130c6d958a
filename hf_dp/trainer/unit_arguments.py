"""The arguments of what is protected, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from hf_dp._arguments import ArgumentGroup, Check, Problems, argument
from hf_dp._validate import integer, one_of
from hf_dp.plans.units import (
    EXAMPLE,
    MAX_ROWS,
    PRIVACY_UNITS,
    REDUCTIONS,
    SAMPLINGS,
    USER,
    Users,
    check_name,
)

if TYPE_CHECKING:
    from hf_dp.batches.units import UnitTable

ARGUMENTS = {
    "privacy_unit_column": "column",
    "privacy_unit_name": "name",
    "max_rows_per_unit": "max_rows",
    "unit_reduction": "reduction",
    "unit_sampling": "sampling",
}


@dataclass
class UnitArguments(ArgumentGroup):
    """Parameters of what is protected.

    With users, a step draws users, and all that a drawn user contributes is clipped once; or it
    draws their rows (Charles et al. 2024, arXiv 2407.07737, section 3).
    """

    privacy_unit: str = argument(
        EXAMPLE,
        "What is protected: example, one row of the training data (a person in k rows is protected "
        "k-fold weaker), or user, all rows of one user (needs privacy_unit_column); "
        "expected_batch_size, delta and all else that counts examples then counts users.",
    )
    privacy_unit_column: str | None = argument(
        None,
        "With privacy_unit=user: the column of the training set that says whose a row is: text or "
        "whole numbers, equal for rows of one user. It is read once and reaches no collator, "
        "model, log or card; only its name does.",
    )
    privacy_unit_name: str | None = argument(
        None, "What the card calls one of them, for example patient. Unset means user."
    )
    max_rows_per_unit: int | None = argument(
        None,
        "Most rows of a drawn user that take part in a step, chosen at random each time. Unset "
        f"means {MAX_ROWS}. Memory, time and how well a user is represented; never epsilon. It is "
        "public: do not read it off the data.",
    )
    unit_reduction: str | None = argument(
        None,
        f"How a drawn user's rows become one gradient before it is clipped: "
        f"{' or '.join(REDUCTIONS)} over them. Unset means {REDUCTIONS[0]}.",
    )
    unit_sampling: str | None = argument(
        None,
        f"What a step draws: {' or '.join(SAMPLINGS)}. With examples, rows are drawn, at most "
        "max_rows_per_unit of each user, chosen once; each is clipped by itself, "
        "expected_batch_size counts rows, and more rows of a user cost epsilon. hf-dp plan "
        f"compares the two. Unset means {SAMPLINGS[0]}.",
    )

    CHECKS: ClassVar[Mapping[str, Check]] = {
        "privacy_unit": (one_of, PRIVACY_UNITS),
        "privacy_unit_column": (check_name,),
        "privacy_unit_name": (check_name,),
        "max_rows_per_unit": (integer, 1),
        "unit_reduction": (one_of, REDUCTIONS),
        "unit_sampling": (one_of, SAMPLINGS),
    }

    @staticmethod
    def problems(args: Any, found: Problems) -> None:
        """Note users without a column, and arguments of users where rows are protected."""
        if args.privacy_unit == EXAMPLE:
            for name in ARGUMENTS:
                if getattr(args, name) is not None:
                    found.refuse(
                        name,
                        f"to be unset with privacy_unit={EXAMPLE!r}",
                        f"Set privacy_unit={USER!r}, or remove it.",
                    )
        elif args.privacy_unit == USER:
            _user_problems(args, found)


def _user_problems(args: Any, found: Problems) -> None:
    from hf_dp.batches.padding import LABELS

    if args.privacy_unit_column is None:
        found.refuse(
            "privacy_unit_column",
            f"to be given with privacy_unit={USER!r}",
            "Name the column of the training set that says whose each row is.",
        )
    if args.privacy_unit_column in LABELS:
        found.refuse(
            "privacy_unit_column",
            "to be another column than the label, which the model trains on: the column of users "
            "is taken off",
            "Name the column that says whose each row is; if that is the label, copy it under "
            "another name (dataset.add_column) and name the copy.",
        )
    by_row = args.unit_sampling == SAMPLINGS[1]
    if by_row and args.unit_reduction is not None:
        found.refuse(
            "unit_reduction",
            f"to be unset with unit_sampling={args.unit_sampling!r}",
            "Each row is then clipped by itself. Remove it.",
        )
    if args.max_rows_per_unit != 1 and not by_row and args.auto_physical_batch_size:
        found.refuse(
            "auto_physical_batch_size",
            f"to be False with privacy_unit={USER!r}",
            "What the rows of a user take together is not measured. Set "
            "`per_device_train_batch_size` yourself.",
        )


def users_of(args: Any, units: UnitTable | None = None) -> Users | None:
    """Return what the arguments say of users, None where rows are protected.

    Args: units: whose the rows are, once it is known.

    Raises: InvalidArgumentError.
    """
    if args.privacy_unit != USER:
        return None
    given = {ours: getattr(args, theirs) for theirs, ours in ARGUMENTS.items()}
    users = Users(**{name: value for name, value in given.items() if value is not None})
    if units is None or not users.by_row:
        return users
    return replace(users, num_rows=len(units.capped(users.max_rows)))
