"""Rows in fixed groups, each of which is one example (:class:`hf_dp.plans.draws.Groups`)."""

from __future__ import annotations

from torch.utils.data import Dataset

from hf_dp.batches.structure import DataSet, Row
from hf_dp.plans.draws import Draw


class GroupedRows(Dataset[list[Row]]):
    """Example i is the list of the rows i k to i k + k - 1; the rows after the last whole group are
    in none."""

    def __init__(self, rows: DataSet, rows_per_group: int):
        self.rows, self.rows_per_group = rows, rows_per_group

    def __len__(self) -> int:
        return len(self.rows) // self.rows_per_group

    def __getitem__(self, index: int) -> list[Row]:
        first = index * self.rows_per_group
        return [self.rows[place] for place in range(first, first + self.rows_per_group)]


def in_groups(rows: DataSet, draw: Draw) -> DataSet:
    """Return the rows as a draw takes them: one by one, or in groups."""
    return GroupedRows(rows, draw.group_size) if draw.group_size > 1 else rows
