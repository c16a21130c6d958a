"""The arguments of whose rows are protected, of the rows, and of an audit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from hf_dp._arguments import ArgumentGroup, Need, Problems, argument, is_given
from hf_dp._validate import invalid, one_of, real
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.plans.dp_sgd import DP_SGD
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
from hf_dp.statement.audited import GRADIENTS, SCORES
from hf_dp.statement.facts import ALL, ANY, FIRST, LONGEST, LOOK_OVERS, OTHER_TRAINING, SHAPES

if TYPE_CHECKING:
    from hf_dp.batches.units import UnitTable

_OF_USERS = {
    "privacy_unit_column": "column",
    "privacy_unit_name": "name",
    "max_rows_per_unit": "max_rows",
    "unit_reduction": "reduction",
    "unit_sampling": "sampling",
}
_PATIENTS = "'user' means whole users. Call them patients with privacy_unit_name='patient'."


def _column_of_users(name: str, value: object) -> str:
    from hf_dp.batches.padding import LABELS

    if value in LABELS:
        raise invalid(
            name,
            value,
            "to be a column other than the label, since this one is removed",
            "Copy it under another name (dataset.add_column), and name the copy.",
        )
    return check_name(name, value)


@dataclass
class UnitArguments(ArgumentGroup):
    """Parameters of what is protected.

    With users, a step draws users, and all that a drawn user contributes is clipped once; or it
    draws their rows (Charles et al. 2024, arXiv 2407.07737, section 3).
    """

    privacy_unit: str = argument(
        EXAMPLE,
        "What is protected: example, one row of the training data (a person in k rows is "
        "protected k-fold weaker), or user, all rows of one user (needs privacy_unit_column); "
        "whatever counts examples then counts users.",
        partial(one_of, choices=PRIVACY_UNITS, next_move=_PATIENTS),
    )
    privacy_unit_column: str | None = argument(
        None,
        "With privacy_unit=user: the column that says whose a row is, as text or whole numbers. It "
        "is read once and reaches no collator, model, log or card; only its name does.",
        _column_of_users,
    )
    privacy_unit_name: str | None = argument(
        None, "What the card calls a user, for example patient. Unset means user.", check_name
    )
    max_rows_per_unit: int | None = argument(
        None,
        "Most rows of a drawn user that take part in a step, chosen at random each time. Unset "
        f"means {MAX_ROWS}. It is public: do not read it off the data.",
    )
    unit_reduction: str | None = argument(
        None,
        f"How a drawn user's rows become one gradient before it is clipped: "
        f"{' or '.join(REDUCTIONS)} over them. Unset means {REDUCTIONS[0]}.",
        REDUCTIONS,
    )
    unit_sampling: str | None = argument(
        None,
        f"What a step draws: {' or '.join(SAMPLINGS)}. With examples, rows are drawn, at most "
        "max_rows_per_unit of each user, chosen once; expected_batch_size counts rows, and more "
        f"rows per user cost more epsilon. Unset means {SAMPLINGS[0]}.",
        SAMPLINGS,
    )

    NEEDS: ClassVar[tuple[Need, ...]] = (
        Need(" ".join(_OF_USERS), "privacy_unit", (USER,), "Set it to 'user', or remove this."),
        Need(
            "unit_reduction",
            "unit_sampling",
            (None, SAMPLINGS[0]),
            "Each row is then clipped by itself. Remove it.",
        ),
    )

    @staticmethod
    def problems(args: Any, found: Problems) -> None:
        """Note users without a column, and what is not measured of them."""
        if args.privacy_unit != USER:
            return
        if args.privacy_unit_column is None:
            found.refuse(
                "privacy_unit_column",
                f"to be given with privacy_unit={USER!r}",
                "Name the column of the training set that says who each row belongs to.",
            )
        one_by_one = args.max_rows_per_unit == 1 or args.unit_sampling == SAMPLINGS[1]
        if args.auto_physical_batch_size and not one_by_one:
            found.refuse(
                "auto_physical_batch_size",
                f"to be False with privacy_unit={USER!r}",
                "What the rows of a user take together is not measured. Set "
                "`per_device_train_batch_size` yourself.",
            )


def users_of(args: Any, units: UnitTable | None = None) -> Users | None:
    """Return what the arguments say of users; None where rows are protected."""
    if args.privacy_unit != USER:
        return None
    given = {ours: getattr(args, theirs) for theirs, ours in _OF_USERS.items()}
    users = Users(**{name: value for name, value in given.items() if value is not None})
    if units is None or not users.by_row:
        return users
    return replace(users, num_rows=len(units.capped(users.max_rows)))


def _numbers_by_column(name: str, value: object) -> dict[str, float]:
    move = "For example {'token_weights': 0}."
    if not isinstance(value, dict) or not all(isinstance(column, str) for column in value):
        raise invalid(name, value, "to be a mapping from columns to numbers", move)
    for fill in value.values():
        real(name, fill, move)
    return dict(value)


def _list_of_paths(name: str, value: object) -> list[str]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(path, str) for path in value):
        raise invalid(
            name, value, "to be a list of folders", "Leave it empty if the rows were never used."
        )
    return list(value)


@dataclass
class RowArguments(ArgumentGroup):
    """Parameters of the rows, and of earlier runs on them."""

    earlier_runs: list[str] = argument(
        [],
        "Folders (or privacy.json files) of earlier private runs on the same rows: what they "
        "released is added to this run's ledger and paid from the same target.",
        _list_of_paths,
    )
    other_training: str | None = argument(
        None,
        f"Which rows any other training of the model used: {' or '.join(OTHER_TRAINING)} (which "
        "the statement is not about). The card repeats it. Otherwise a model that was trained by "
        "anything but counted steps is refused.",
        OTHER_TRAINING,
    )
    padding_values: dict[str, float] = argument(
        {},
        "By column, the value with which a column of your own is padded where rows differ in "
        "length. The columns of transformers are known; others are refused until declared here.",
        _numbers_by_column,
    )
    look_over: str = argument(
        ALL,
        f"Which rows are checked before the first draw: all, or when_drawn: the first {FIRST:,}, "
        "and every other row when it is drawn. A row that cannot be trained on then adds exactly "
        "0, and no message says so; with all, an error names it. when_drawn is for more rows than "
        "can be read beforehand.",
        LOOK_OVERS,
    )
    longest_row: int | None = argument(
        None,
        "With look_over=when_drawn or shapes=few or one, the most tokens of a row, as collated; a "
        "longer one adds 0, and with look_over=all is refused. It is public: do not read it off "
        "the data. Unset means that all rows have as many as the first.",
    )
    shapes: str = argument(
        ANY,
        "Of physical batches. any: as the rows are. one: each batch is filled up with synthetic "
        "rows, which add exactly 0, and padded to longest_row. few: to longest_row, or a half, a "
        "quarter or an eighth of it. How many batches a step has still varies with its draw.",
        SHAPES,
    )
    rows_are_chunks: bool = argument(
        False,
        "Whether a row is a piece of a longer text. Then a piece is what is protected, and the "
        "card says so.",
    )
    adapter_init_data_is_public: bool = argument(
        False,
        "Whether an adapter's initial weights (EVA, CorDA, LoRA-GA), or another run's selection "
        "(FROST), were computed from public data. Otherwise it is refused. The card says so.",
    )
    teacher_is_public: bool = argument(
        False,
        "Whether another model that a loss reads, such as a teacher or DPO's ref_model, was "
        "trained on public data. Otherwise it is refused. The card says so.",
    )
    evaluate_on_training_rows: bool = argument(
        False,
        "Whether evaluation sets may hold rows of the training set. Their metrics are then "
        "released without noise, and the card says so.",
    )

    NEEDS: ClassVar[tuple[Need, ...]] = (
        Need(
            "look_over",
            "privacy_mode",
            (DP_SGD,),
            "DP-FP with rows that are checked when they are drawn is not implemented.",
            UnsupportedArgumentError,
        ),
    )

    @staticmethod
    def problems(args: Any, found: Problems) -> None:
        """Note a length that nothing reads."""
        if args.longest_row is not None and (args.look_over, args.shapes) == (ALL, ANY):
            expected = f"to be left at None with look_over={ALL!r} and shapes={ANY!r}"
            found.refuse(LONGEST, expected, "It is known from the check of all rows.")


@dataclass
class AuditArguments(ArgumentGroup):
    """Parameters of an audit.

    While the run trains, secret coins put canaries in or leave them out (Steinke, Nasr and
    Jagielski 2023, arXiv 2305.08846).
    """

    audit_canaries: int | None = argument(
        None,
        "How many canaries (synthetic rows) join the rows, each by its own coin, to bound epsilon "
        "from below; 1,000 suit many runs. They count as rows. Unset means no audit.",
    )
    audit_scores: str | None = argument(
        None,
        f"What reveals the canaries: {' or '.join(SCORES)}. Unset means {GRADIENTS}: the noised "
        "sums of all steps, in which a canary is one coordinate. In the others it is a synthetic "
        "row that the model sees. directions: the noised sums along each canary's own gradient (a "
        "forward and backward pass per canary and step). losses: its loss before and after.",
        SCORES,
    )

    NEEDS: ClassVar[tuple[Need, ...]] = (
        Need("audit_scores", "audit_canaries", is_given, "Set audit_canaries=1000, or remove it."),
        Need("audit_canaries", "privacy_mode", (DP_SGD,), "Its canaries join noised sums."),
        Need("audit_canaries", "privacy_unit", (EXAMPLE,), "A canary is one row."),
        Need("audit_canaries", "release", ([],), "No epsilon covers it. Remove one of the two."),
        Need(
            "hub_strategy",
            "audit_canaries",
            (None,),
            "Checkpoints would be on the Hub before the audit, at the end, may refute their claim. "
            "Call trainer.push_to_hub() after it.",
            UnsupportedArgumentError,
        ),
    )
