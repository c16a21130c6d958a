"""Rows by whose they are: a column of a data set says which user each row belongs to.

A user is drawn, not a row. Their rows are collated one by one like any others, and stay together
until they are clipped as one.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import datasets
import numpy as np
from torch.utils.data import Sampler, Subset

from hf_dp.batches.loader import Drawn, PhysicalBatches, Read, length_of, physical_batches, shape_of
from hf_dp.batches.structure import Batch, DataSet, Example, Row, Value
from hf_dp.errors import ConfigError, DataError
from hf_dp.noise import untouched_generators
from hf_dp.plans.samplers import Draws, RandomBytes
from hf_dp.plans.units import Users

Rows = tuple[int, ...]  # indices of the rows of one drawn unit


class UnitTable:
    """Which rows belong to which unit, by the text or whole number of each row in a column."""

    def __init__(self, values: Sequence[Value], column: str):
        self.column, self.num_rows = column, len(values)
        numbers: dict[int | str, int] = {}
        unit_of = np.empty(len(values), np.int64)
        for row, value in enumerate(values):
            unit_of[row] = numbers.setdefault(_checked(value, column), len(numbers))
        if len(numbers) < 2:
            raise DataError(
                f"The column {column!r} names {len(numbers)} unit(s), and private training needs "
                "two or more: with one, nothing but noise could be released. Check "
                "privacy_unit_column."
            )
        self._unit_of = unit_of.tobytes()
        self._rows = np.argsort(unit_of, kind="stable")  # those of unit k from _first[k] on
        self._first = np.concatenate([[0], np.bincount(unit_of).cumsum()])
        self._names = frozenset(map(str, numbers))

    def __len__(self) -> int:
        return len(self._first) - 1

    def rows(self, unit: int) -> np.ndarray:
        """Return the indices of a unit's rows, in increasing order."""
        return self._rows[self._first[unit] : self._first[unit + 1]]

    def sizes(self) -> np.ndarray:
        """Return the number of rows of each unit. Not private."""
        return np.diff(self._first)

    def capped(self, most: int) -> np.ndarray:
        """Return the indices of at most ``most`` rows of each unit, in increasing order.

        Which of a unit's n rows these are is a fixed, scattered choice from n, the same in every
        process and after a resume. It depends on no other unit; it need not be secret.
        """
        return np.sort(
            np.concatenate([_scattered(self.rows(unit), most) for unit in range(len(self))])
        )

    def digest(self, key: str = "") -> str:
        """Return a digest of which rows belong together, whatever their users' names; one that is
        kept has a secret key."""
        return hmac.digest(key.encode(), self._unit_of, "sha256").hex()

    def shared(self, values: Sequence[Value]) -> np.ndarray:
        """Return which of these values, compared as text, are of one of the units. Not private."""
        return np.flatnonzero([str(value) in self._names for value in values])

    def chosen(self, unit: int, most: int, random_bytes: RandomBytes) -> Rows:
        """Return a unit's rows, or a uniformly random part of ``most`` of them.

        What is chosen depends on this unit's own rows and on fresh randomness alone.
        """
        rows = self.rows(unit)
        if len(rows) > most:
            # As in PoissonSampler: the order of independent random keys is uniformly random.
            keys = np.frombuffer(random_bytes(8 * len(rows)), dtype=np.uint64)
            rows = np.sort(rows[np.argsort(keys, kind="stable")[:most]])
        return tuple(rows.tolist())


def _scattered(rows: np.ndarray, most: int) -> np.ndarray:
    if len(rows) <= most:
        return rows
    return rows[np.random.default_rng(len(rows)).permutation(len(rows))[:most]]


def _checked(value: object, column: str) -> int | str:
    """Return a value that names a unit. Raises: DataError."""
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, (str, int)) and not isinstance(value, bool) and value != "":
        return value
    raise DataError(
        f"The column {column!r} holds "
        f"{'an empty text' if value == '' else type(value).__name__}. Expected text or whole "
        "numbers, by which rows of one user are recognized: a row that belongs to nobody cannot "
        "be protected. Convert it (dataset.cast_column), fill it in (with a different value for "
        "each such row, if each is another user's), or leave rows out."
    )


def split_off_units(dataset: DataSet, column: str) -> tuple[UnitTable, DataSet]:
    """Return whose the rows are, and the data set without the column that says so, which no
    collator, model, log or card sees."""
    values = unit_values(dataset, column)
    if values is None:
        has = list(dataset.column_names) if isinstance(dataset, datasets.Dataset) else "another"
        raise DataError(
            f"Expected the train_dataset to have the privacy_unit_column {column!r}, which says "
            f"who each row belongs to; it has {has}. Name the right column, or keep it when you "
            "prepare the rows (dataset.map(..., remove_columns=...))."
        )
    table = UnitTable(values, column)
    if isinstance(dataset, datasets.Dataset):
        return table, dataset.remove_columns(column)
    return table, _Without(dataset, column)


def rows_to_draw(dataset: DataSet, table: UnitTable, users: Users) -> DataSet:
    """Return the rows that a run trains on: all, or at most ``max_rows`` of each user where rows
    are drawn one by one."""
    if not users.by_row:
        return dataset
    chosen = table.capped(users.max_rows).tolist()
    if isinstance(dataset, datasets.Dataset):
        return dataset.select(chosen)
    return Subset(dataset, chosen)


def unit_values(dataset: DataSet, column: str) -> list[Value] | None:
    """Return a column of a data set; None if it has none of that name, or can only be iterated."""
    if isinstance(dataset, datasets.Dataset):
        if column not in dataset.column_names:
            return None
        return list(dataset.with_format(None)[column])
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        return None
    values = []
    with untouched_generators():  # an adapter may be drawn from them next, and is released
        for index in range(len(dataset)):
            row = dataset[index]
            if not (isinstance(row, Mapping) and column in row):
                return None
            values.append(row[column])
    return values


class _Without(Subset[Row]):
    """All rows of a data set of mappings, without one of their keys: a Subset, so that where they
    come from can still be seen, and of a list, which may change later, a copy."""

    def __init__(self, dataset: DataSet, column: str):
        dataset = list(dataset) if isinstance(dataset, list) else dataset
        super().__init__(dataset, range(len(dataset)))
        self.column = column

    def __getitem__(self, index: int) -> Row:
        row = super().__getitem__(index)
        return {name: value for name, value in row.items() if name != self.column}

    def __getitems__(self, indices: list[int]) -> list[Row]:
        return [self[index] for index in indices]


def check_units(units: UnitTable | None, users: Users | None, num_examples: int) -> None:
    """Raise ConfigError or DataError when whose the rows are does not fit a plan."""
    if units is None or users is None:
        if units is not users:
            raise ConfigError(
                "Expected `units` exactly with a plan that protects users (privacy_unit='user')."
            )
        return
    if len(units) != num_examples:
        raise DataError(
            f"The column {units.column!r} names {len(units)} users, but the privacy plan was made "
            f"for {num_examples}. Set num_examples to the number of users."
        )
    if users.by_row and (rows := len(units.capped(users.max_rows))) != users.num_rows:
        raise DataError(
            f"There are {rows} rows to draw from, at most {users.max_rows} of each user, but the "
            f"privacy plan was made for {users.num_rows}. Set num_rows to {rows}."
        )


class UnitBatch(NamedTuple):
    """A physical batch of units with ``rows`` rows each, those of one together; losses are summed
    times ``scale``, 1 or 1 / its rows. It ``continues`` if others of its one unit follow."""

    inputs: Batch
    rows: int
    scale: float
    continues: bool = False


@dataclass(frozen=True)
class UnitDraws(Sampler[list[Rows]]):
    """The rows of drawn units: batches of units, each a tuple of those of its rows that the source
    of randomness chooses, afresh in each draw."""

    draws: Draws
    table: UnitTable
    users: Users
    random_bytes: RandomBytes

    def __iter__(self) -> Iterator[list[Rows]]:
        most, secret = self.users.max_rows, self.random_bytes
        for drawn in self.draws:
            yield [self.table.chosen(unit, most, secret) for unit in drawn]

    def __len__(self) -> int:
        return len(self.draws)


class Reduction(Protocol):
    """Says how a unit's rows become one gradient, as :class:`hf_dp.plans.units.Users` does."""

    def scale(self, rows: int) -> float: ...


@dataclass(frozen=True)
class UnitBatches:
    """Splits the units of one draw into physical batches, and never one that fits into a batch.

    Only units with equally many rows share a batch: the engine then joins the rows of each by a
    change of shape. A unit of more rows than fit gets batches of its own, one after the other. So
    does one whose rows differ in shape where only rows of one shape may share a batch.
    """

    batches: PhysicalBatches
    reduction: Reduction

    def __call__(self, drawn: Sequence[Drawn[Sequence[Example]]]) -> list[Batch]:
        """Return the physical batches: plain ones of units of one row, and :class:`UnitBatch`."""
        drawn = [one._replace(unit=[*map(self.batches.shaped, one.unit)]) for one in drawn]
        for one in drawn:
            self.batches.lengths(one.unit)  # or raise
        alone = [one for one in drawn if not self._fits(one.unit)]
        return [
            *(batch for one in alone for batch in self._parts(one)),
            *self._together([one for one in drawn if self._fits(one.unit)]),
        ]

    def _fits(self, unit: Sequence[Example]) -> bool:
        return len(unit) == 1 or len(self._cut(unit)) == 1

    def _cut(self, unit: Sequence[Example]) -> list[list[int]]:
        """Cut the rows of one unit, by their place in it: no other unit stands beside them."""
        return self.batches.cut(unit, range(len(unit)))

    def _parts(self, one: Drawn[Sequence[Example]]) -> Iterator[UnitBatch]:
        reads, left = _reads(one), len(one.unit)
        scale = self.reduction.scale(left)
        for group in self._cut(one.unit):
            left -= len(group)
            padded = self.batches.padded([reads[place] for place in group])
            yield UnitBatch(padded, len(group), scale, left > 0)

    def _together(self, drawn: Sequence[Drawn[Sequence[Example]]]) -> Iterator[Batch]:
        by_rows: dict[int, list[Drawn[Sequence[Example]]]] = {}
        for one in drawn:
            by_rows.setdefault(len(one.unit), []).append(one)
        for rows in sorted(by_rows, reverse=True):
            alike = [one.unit for one in by_rows[rows]]
            for group in physical_batches(
                [rows * max(map(length_of, unit)) for unit in alike],
                [one.key for one in by_rows[rows]],
                self.batches.size // rows,
                self.batches.max_tokens,
                [shape_of(unit[0]) for unit in alike] if self.batches.one_shape else None,
            ):
                reads = [read for place in group for read in _reads(by_rows[rows][place])]
                padded = self.batches.padded(reads)
                yield padded if rows == 1 else UnitBatch(padded, rows, self.reduction.scale(rows))


def _reads(one: Drawn[Sequence[Example]]) -> list[Read]:
    return [Read(example, place not in one.missing) for place, example in enumerate(one.unit)]
