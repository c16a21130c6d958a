"""The look at every row by whole columns, where values are plain and the collator is known.

What :func:`hf_dp.batches.look_over.look_over` finds follows from lengths and ranges then. Arrow has
them at once, where collating each row takes half a millisecond. What is not plain, or looks wrong,
is left to the look at single rows, which names the row.
"""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    DefaultDataCollator,
    default_data_collator,
)

from hf_dp.batches.limits import Limits
from hf_dp.batches.padding import LABELS
from hf_dp.errors import DataError
from hf_dp.losses import IGNORED_LABEL

_AT_ONCE = 2**16  # rows
_OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids", "special_tokens_mask")


class Columns:
    """The rows of a data set, by column.

    Attributes:
        plain: whether all values are integers or truth values, each in its range; all rows have
            tokens, all of them attended to, and as many numbers as tokens where they must.
        tokens: (N,), how many a row has.
        has_target: (N,), whether any of its labels counts.
        extremes: the first row, and those with the fewest and the most numbers in a column.
    """

    def __init__(self, rows: Any, collator: object, limits: Limits):
        self._limits, self._collator = limits, collator
        self._lengths: dict[str, list[np.ndarray]] = {name: [] for name in _OF_TOKENS[:2]}
        self._targets: list[np.ndarray] = []
        several = limits.places or limits.marks or limits.of_choices
        known = _is_known(collator) and not several
        self.plain = known and _is_plain(rows) and all(map(self._takes, _tables(rows)))
        self.plain = self.plain and all(map(len, self._lengths.values()))
        if self.plain:
            self._sum_up()

    def _sum_up(self) -> None:
        lengths = {name: np.concatenate(parts) for name, parts in self._lengths.items()}
        self.tokens = lengths["input_ids"]
        self.has_target = np.concatenate(self._targets or [self.tokens > 0])
        ends = [place for each in lengths.values() for place in (each.argmin(), each.argmax())]
        self.extremes = sorted({0, *map(int, ends)})
        of_tokens = {*_OF_TOKENS, *self._limits.as_long_as_tokens} & lengths.keys()
        self.plain = all(np.array_equal(lengths[name], self.tokens) for name in of_tokens)

    def _takes(self, table: pa.Table) -> bool:
        """Return whether a part of the rows is plain, and note what is in it."""
        labels = [name for name in table.column_names if name in LABELS]
        return len(labels) < 2 and all(
            self._column(name, table[name].combine_chunks()) for name in table.column_names
        )

    def _column(self, name: str, column: Any) -> bool:
        is_list, is_label = pa.types.is_list(column.type), name in LABELS
        numbers = column.flatten() if is_list else column
        if column.null_count or numbers.null_count:
            return False
        if not pa.types.is_integer(numbers.type):
            return not is_list and not is_label and pa.types.is_boolean(numbers.type)
        values = numbers.to_numpy()
        if is_list:
            lengths = column.value_lengths().to_numpy()
            self._lengths.setdefault(name, []).append(lengths)
            if not lengths.all() or name not in (*_OF_TOKENS, "labels"):
                return False
            if name == "input_ids" and not self._may_hold(values, lengths):
                return False
        limit = self._limits.below.get("labels" if is_label else name)
        if is_label:
            other = DataCollatorWithPadding if is_list else DataCollatorForSeq2Seq
            if limit is None or isinstance(self._collator, other):
                return False
            counts = values != IGNORED_LABEL
            if "labels" not in self._limits.ignorable and not counts.all():
                return False
            of_rows = (
                np.logical_or.reduceat(counts, lengths.cumsum() - lengths) if is_list else counts
            )
            self._targets.append(of_rows)
            values = values[counts]
        if name == "attention_mask" and not (values == 1).all():
            return False
        return limit is None or not len(values) or (values.min() >= 0 and values.max() < limit)

    def _may_hold(self, values: np.ndarray, lengths: np.ndarray) -> bool:
        """Return whether the model takes the tokens of each row."""
        if self._limits.check_tokens is not None:
            try:
                for tokens in torch.tensor(values).split(lengths.tolist()):
                    self._limits.check_tokens(tokens)
            except DataError:
                return False
        return True


def _tables(rows: datasets.Dataset) -> Any:
    return rows.with_format("arrow", columns=rows.format["columns"]).iter(_AT_ONCE)


def _is_known(collator: object) -> bool:
    """Return whether a collator makes tensors of a row's columns, and pads, and nothing else."""
    if type(collator) is DataCollatorForSeq2Seq:
        return collator.model is None and collator.label_pad_token_id == IGNORED_LABEL
    known = type(collator) in (DataCollatorWithPadding, DefaultDataCollator)
    return known or collator is default_data_collator


def _is_plain(rows: object) -> bool:
    if not isinstance(rows, datasets.Dataset) or rows.format["output_all_columns"]:
        return False
    return rows.format["type"] is None and len(rows) > 0
