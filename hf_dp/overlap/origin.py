"""Where rows come from: which object, which index in it, which place in Arrow memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from hf_dp.overlap.encoding import is_scalar


@dataclass(frozen=True, eq=False)
class Part:
    """Some rows (None: all) of an object that is neither a Subset nor a ConcatDataset."""

    base: Any
    chosen: np.ndarray | None = None

    @cached_property
    def streams(self) -> bool:
        """Whether rows can only be iterated over."""
        sized = hasattr(self.base, "__len__") and hasattr(self.base, "__getitem__")
        return not sized or isinstance(self.base, IterableDataset)

    @cached_property
    def length(self) -> int:
        """The number of rows; for a stream, 1 if there are any and 0 if not."""
        if self.chosen is not None:
            return len(self.chosen)
        return sum(1 for _ in islice(self.base, 1)) if self.streams else len(self.base)

    @cached_property
    def indices(self) -> np.ndarray:
        """The index of each row in ``base``."""
        return np.arange(self.length) if self.chosen is None else self.chosen

    @cached_property
    def table(self) -> Any:
        """The Arrow table below a `datasets.Dataset`; None for anything else."""
        datasets = sys.modules.get("datasets")
        if (
            datasets is None
            or not isinstance(self.base, datasets.Dataset)
            or not hasattr(self.base, "_indices")
        ):
            return None
        return getattr(getattr(self.base, "_data", None), "table", None)

    def table_rows(self) -> np.ndarray | None:
        """Return each row's index in ``table``; None stands for all, in order."""
        if self.base._indices is None:
            return self.chosen
        return self.base._indices.table.column(0).to_numpy().astype(np.int64)[self.indices]

    def is_read_from_table(self, served: bool) -> bool:
        """Return whether rows are read as Arrow holds them.

        With ``served``, the rows of a data set with a transform of the user's are not.
        """
        return self.table is not None and not (served and self.base.format["type"] == "custom")

    def fields(self, served: bool) -> Mapping[str, Any]:
        """Return the values of one row by column; for an Arrow table, only the names."""
        if self.is_read_from_table(served):
            return dict.fromkeys(self.table.column_names)
        return fields_of(next(self.values()))

    def values(self) -> Iterator[Any]:
        """Yield the rows as Python objects."""
        if self.streams:
            return iter(self.base)
        return (self.base[index] for index in self.indices.tolist())


def parts_of(dataset: Any) -> Iterator[Part]:
    """Yield what a data set is made of, through Subset and ConcatDataset."""
    if isinstance(dataset, Subset):
        indices = np.asarray(dataset.indices, dtype=np.int64).reshape(-1)
        indices = np.where(indices < 0, indices + len(dataset.dataset), indices)  # type: ignore[arg-type]
        start = 0
        for part in parts_of(dataset.dataset):
            inside = indices[(start <= indices) & (indices < start + part.length)] - start
            yield Part(part.base, part.indices[inside])
            start += part.length
    elif isinstance(dataset, ConcatDataset):
        for inner in dataset.datasets:
            yield from parts_of(inner)
    else:
        yield Part(dataset)


def share_memory(
    training: list[Part], evaluation: list[Part], is_metadata: Callable[[str], bool]
) -> bool:
    """Return whether some row of both is the same index of one object, or one place in memory.

    The memory is Arrow's. Labels and ids (``is_metadata``) count only if a set has nothing else:
    one array may number the rows of two sets.
    """
    tables = [
        part.table.column_names for part in [*training, *evaluation] if part.table is not None
    ]
    anything = any(all(map(is_metadata, names)) for names in tables)
    ours, theirs = (
        _places(parts, lambda name: anything or not is_metadata(name))
        for parts in (training, evaluation)
    )
    return any(
        np.isin(np.concatenate(theirs[key]), np.concatenate(ours[key])).any()
        for key in ours.keys() & theirs
    )


def _places(parts: list[Part], carries: Callable[[str], bool]) -> dict[Any, list[np.ndarray]]:
    """Return row indices by object and, under "arrow", bit addresses of chosen columns.

    Args:
        carries: whether the column of this name counts.
    """
    found: dict[Any, list[np.ndarray]] = {}
    for part in parts:
        found.setdefault(id(part.base), []).append(part.indices)
        if part.table is not None:
            rows = part.table_rows()
            for column in map(part.table.column, filter(carries, part.table.column_names)):
                places = np.concatenate([np.zeros(0, np.int64), *map(_addresses, column.chunks)])
                places = places if rows is None else places[rows]
                found.setdefault("arrow", []).append(places[places >= 0])
    return found


def _addresses(array: Any) -> np.ndarray:
    """Return the bit address of each element of an Arrow array; -1 where its type has none."""
    start, width = _slot(array) if len(array) else (-1, 0)
    return start + width * np.arange(len(array))


def _slot(array: Any) -> tuple[int, int]:
    """Return the bit address of the first element, or of its offset, and the step to the next.

    Strings and lists have offsets.
    """
    import pyarrow as pa

    kind, types = array.type, pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _slot(array.storage)
    if types.is_struct(kind):
        return max((_slot(array.field(index)) for index in range(kind.num_fields)), default=(-1, 0))
    if types.is_fixed_size_list(kind):
        start, width = _slot(array.values[array.offset * kind.list_size :])
        return (start, width * kind.list_size) if width * kind.list_size else (-1, 0)
    place = array.buffers()[1] if len(array.buffers()) > 1 else None
    try:
        width = kind.bit_width
    except ValueError:  # of variable length: an offset each
        long = (
            types.is_large_string(kind) or types.is_large_binary(kind) or types.is_large_list(kind)
        )
        width = 64 if long else 32
    return (8 * place.address + array.offset * width, width) if place and width else (-1, 0)


def fields_of(row: Any) -> Mapping[str, Any]:
    """Return a row's values by column; a tuple's are numbered, without scalars (labels, ids)."""
    if isinstance(row, Mapping):
        return row
    several = isinstance(row, tuple) or (isinstance(row, list) and not all(map(is_scalar, row)))
    elements = row if several else (row,)
    return {str(index): value for index, value in enumerate(elements) if not is_scalar(value)}
