"""A check of whether an evaluation set holds rows of users of the training set."""

from __future__ import annotations

from typing import Any

from transformers.utils import logging

from hf_dp.batches.units import UnitTable, unit_values
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.overlap.compare import LARGEST_SHARE, each_named, in_words

logger = logging.get_logger(__name__)


class TrainingUsers:
    """The users of a training set, to compare evaluation sets with.

    Args:
        table: whose the training rows are. name: what one of them is called.
    """

    def __init__(self, table: UnitTable, name: str):
        self.table, self.name = table, name
        self._seen: dict[int, tuple[Any, bool]] = {}  # keeps the object, and so its id

    def refuse(self, evaluation: Any) -> bool:
        """Refuse evaluation sets with rows of training users; warn once about a few.

        Args: evaluation: one set, a mapping of names to sets, or None.

        Returns:
            whether every set says whose its rows are.

        Raises: UnsupportedArgumentError.
        """
        found = [self._judge(name, each) for name, each in each_named(evaluation)]
        return all(found)

    def shared(self, evaluation: Any) -> int | None:
        """Count the rows of one evaluation set that are training users'; None if it does not say
        whose they are."""
        values = unit_values(evaluation, self.table.column)
        return None if values is None else self.table.shared(values)

    def _judge(self, which: Any, evaluation: Any) -> bool:
        if id(evaluation) not in self._seen:
            self._seen[id(evaluation)] = (evaluation, self._compare(which, evaluation))
        return self._seen[id(evaluation)][1]

    def _compare(self, which: Any, evaluation: Any) -> bool:
        values = unit_values(evaluation, self.table.column)
        if values is None:
            return False
        shared = self.table.shared(values)
        where = in_words(which)
        if shared > LARGEST_SHARE * len(values):
            raise UnsupportedArgumentError(
                f"Expected an evaluation set of others than the training set's, but the {where} "
                f"has rows of the same values in {self.table.column!r}: metrics are computed "
                f"without noise, and epsilon would not cover what they say of a {self.name}. Split "
                f"by {self.table.column!r}, or set evaluate_on_training_rows=True: the metrics are "
                "then a release that the card names."
            )
        if shared:
            logger.warning(
                "Some rows of the %s belong to a %s of the training set. Metrics are computed from "
                "them without noise, and epsilon does not cover that.",
                where,
                self.name,
            )
        return True
