"""The arguments of ``privacy_unit="user"``, and their checks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hf_dp._validate import invalid
from hf_dp.batches.padding import LABELS
from hf_dp.batches.units import UnitTable
from hf_dp.errors import InvalidArgumentError
from hf_dp.plans.units import EXAMPLE, MAX_ROWS, REDUCTIONS, SAMPLINGS, USER, Users

ARGUMENTS = {
    "privacy_unit_column": "column",
    "privacy_unit_name": "name",
    "max_rows_per_unit": "max_rows",
    "unit_reduction": "reduction",
    "unit_sampling": "sampling",
}


@dataclass
class UnitArguments:
    r"""
    Arguments of [`DPTrainingArguments`] that only `privacy_unit="user"` reads. A step then draws
    users, and all that a drawn user contributes is clipped once; or it draws their rows (Charles et
    al. 2024, arXiv 2407.07737, section 3).

    > Parameters of users

        privacy_unit_column (`str`, *optional*):
            The column of `train_dataset` that says whose a row is: text or whole numbers, equal for
            rows of one user. It is read once and reaches no collator, model, log or card; only its
            name does.
        privacy_unit_name (`str`, *optional*):
            What the card calls one of them, for example `"patient"`. Unset means `"user"`.
        max_rows_per_unit (`int`, *optional*):
            The most rows of a drawn user that take part in a step, chosen at random each time;
            unset means 10. Memory, time and how well a user is represented; never epsilon. It is
            public: do not read it off the data.
        unit_reduction (`str`, *optional*):
            Whether a user's gradient is the `"mean"` (unset means this) or the `"sum"` over these
            rows, before it is clipped.
        unit_sampling (`str`, *optional*):
            What a step draws: `"users"` (unset means this), or `"examples"`: rows, at most
            `max_rows_per_unit` of each user, chosen once. Each row is then clipped by itself,
            `expected_batch_size` counts rows, and more rows of a user cost epsilon. `hf-dp plan`
            compares the two.
    """

    privacy_unit_column: str | None = field(
        default=None,
        metadata={"help": "With privacy_unit=user: the column that says whose each row is."},
    )
    privacy_unit_name: str | None = field(
        default=None,
        metadata={"help": "What the card calls a user, for example patient. Unset means user."},
    )
    max_rows_per_unit: int | None = field(
        default=None,
        metadata={
            "help": "Most rows of a drawn user that take part in a step, chosen at random each "
            f"time. Unset means {MAX_ROWS}."
        },
    )
    unit_reduction: str | None = field(
        default=None,
        metadata={
            "help": f"How a user's rows become one gradient: {' or '.join(REDUCTIONS)}. Unset "
            f"means {REDUCTIONS[0]}."
        },
    )
    unit_sampling: str | None = field(
        default=None,
        metadata={
            "help": f"What a step draws: {' or '.join(SAMPLINGS)}. With examples, rows are drawn "
            "and clipped one by one, and max_rows_per_unit costs epsilon. Unset means "
            f"{SAMPLINGS[0]}."
        },
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


def unit_problems(args: Any) -> dict[str, InvalidArgumentError]:
    """Return what is wrong with the arguments of users, by name."""
    if args.privacy_unit == EXAMPLE:
        return {
            name: invalid(
                name,
                getattr(args, name),
                f"to be unset with privacy_unit={EXAMPLE!r}",
                f"Set privacy_unit={USER!r}, or remove it.",
            )
            for name in ARGUMENTS
            if getattr(args, name) is not None
        }
    if args.privacy_unit != USER:
        return {}
    name = "privacy_unit_column"
    if args.privacy_unit_column is None:
        return {
            name: invalid(
                name,
                None,
                f"to be given with privacy_unit={USER!r}",
                "Name the column of the training set that says whose each row is.",
            )
        }
    if args.privacy_unit_column in LABELS:
        return {
            name: invalid(
                name,
                args.privacy_unit_column,
                "to be another column than the label, which the model trains on: the column of "
                "users is taken off",
                "Name the column that says whose each row is; if that is the label, copy it under "
                "another name (dataset.add_column) and name the copy.",
            )
        }
    try:
        users = users_of(args)
    except InvalidArgumentError as error:
        return {str(error).split("`")[1]: error}
    if users is None:
        return {}
    if users.by_row and args.unit_reduction is not None:
        name = "unit_reduction"
        return {
            name: invalid(
                name,
                args.unit_reduction,
                f"to be unset with unit_sampling={users.sampling!r}",
                "Each row is then clipped by itself. Remove it.",
            )
        }
    if users.max_rows > 1 and not users.by_row and args.auto_physical_batch_size:
        name = "auto_physical_batch_size"
        return {
            name: invalid(
                name,
                True,
                f"to be False with privacy_unit={USER!r}",
                "What the rows of a user take together is not measured. Set "
                "`per_device_train_batch_size` yourself.",
            )
        }
    return {}
