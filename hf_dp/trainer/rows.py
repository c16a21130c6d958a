"""The rows that a trainer is given, without the column that says whose they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hf_dp.batches.units import UnitTable, rows_to_draw, split_off_units
from hf_dp.overlap import TrainingUsers
from hf_dp.run.checks import check_train_dataset, hint_at_users, warn_of_users
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.unit_arguments import users_of


@dataclass(frozen=True)
class Rows:
    """Training rows, of which it is noted whose they are in private modes.

    Args:
        data: the rows to train on, without the column that says so.
        units: whose they are, where users are protected.
        compared: whether every evaluation set says whose its rows are.
    """

    data: Any
    units: UnitTable | None = None
    compared: bool = True

    @classmethod
    def of(cls, args: DPTrainingArguments, train_dataset: Any, eval_dataset: Any) -> Rows:
        """Note whose the training rows are. What was noted before is returned as it is.

        Raises: DataError; UnsupportedArgumentError for an evaluation set with rows of the same
            users, unless their metrics are released on purpose.
        """
        noted = train_dataset if isinstance(train_dataset, cls) else None
        data = train_dataset if noted is None else noted.data
        if not args.is_private:
            return cls(data)
        check_train_dataset(data)
        if noted is not None:
            return noted
        users = users_of(args)
        if users is None:
            hint_at_users(train_dataset)
            return cls(train_dataset)
        units, data = split_off_units(train_dataset, users.column)
        data = rows_to_draw(data, units, users)
        warn_of_users(units, users)
        compared = args.evaluate_on_training_rows or TrainingUsers(units).refuse(
            eval_dataset, search=args.private_selection_mean_runs is not None
        )
        return cls(data, units, compared)
