"""Keyed hashes of rows, over all compared columns together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from hf_dp.errors import DataError
from hf_dp.overlap.encoding import (
    cells,
    encode,
    is_list,
    is_number,
    lengths_of,
    to_numpy,
    without_views,
)
from hf_dp.overlap.origin import Part, fields_of, parts_of

BATCH_ROWS = 1024  # of an Arrow table, in memory at a time
TOKENS, MASK = "input_ids", "attention_mask"


@dataclass(frozen=True)
class Columns:
    """What is compared.

    Attributes:
        names: the columns.
        pictures: those that are decoded as pictures.
        served: whether rows are compared after the user's transforms.
    """

    names: tuple[str, ...]
    pictures: frozenset[str]
    served: bool


def hash_rows(parts: list[Part], columns: Columns, key: bytes) -> np.ndarray:
    """Return one keyed hash for each row, over all compared columns together."""
    found = [np.zeros(0, np.uint64)]
    for part in parts:
        rows = _table_rows if part.is_read_from_table(columns.served) else _object_rows
        digests = b"".join(
            blake2b(row, digest_size=8, key=key).digest() for row in rows(part, columns)
        )
        hashes = np.frombuffer(digests, np.uint64)
        chosen = part.table_rows() if rows is _table_rows else None
        found.append(
            hashes if chosen is None else hashes[np.unique(chosen, return_inverse=True)[1]]
        )
    return np.concatenate(found)


def digest_of_rows(dataset: Any) -> str:
    """Return a digest of all rows in their order, before any transform of the user's.

    Raises: DataError for rows that differ on each reading, which cannot be compared.
    """
    found = blake2b(digest_size=16)
    for description in _structure(dataset):
        found.update(description)
    for part in parts_of(dataset):
        columns = Columns(tuple(sorted(part.fields(False))), frozenset(), False)
        if not is_repeatable(part, columns):
            raise DataError(
                "Rows of train_dataset differ each time they are read, so it cannot be seen "
                "whether all processes have the same rows in the same order. Move what is random "
                "(augmentation) into the data collator or, for a datasets.Dataset, into "
                "set_transform; or launch one process."
            )
        found.update(f"{part.length} {columns.names}".encode())
        found.update(hash_rows([part], columns, b"").tobytes())
    return found.hexdigest()


def _structure(dataset: Any) -> Iterator[bytes]:
    """Yield how Subset and ConcatDataset arrange rows: parts do not tell the order."""
    if isinstance(dataset, Subset):
        yield b"subset" + np.asarray(dataset.indices, np.int64).tobytes()
        yield from _structure(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        yield f"joined {len(dataset.datasets)}".encode()
        for inner in dataset.datasets:
            yield from _structure(inner)


def is_repeatable(part: Part, columns: Columns) -> bool:
    """Return whether the first row is the same when read again; a random transform's is not."""
    if part.is_read_from_table(columns.served) or not part.length or part.streams:
        return True
    first, again = (next(_object_rows(part, columns)) for _ in range(2))
    return first == again


def _object_rows(part: Part, columns: Columns) -> Iterator[bytes]:
    """Yield the encoded compared columns of each row of Python objects."""
    for row in part.values():
        fields = fields_of(row)
        values = _unpadded({name: fields.get(name) for name in columns.names})
        yield b"".join(map(encode, values.values()))


def _table_rows(part: Part, columns: Columns) -> Iterator[bytes]:
    """Yield the same for an Arrow table: each chosen row once, in the table's order."""
    chosen = part.table_rows()
    wanted = None if chosen is None else np.unique(chosen)
    start = 0
    for batch in part.table.select(list(columns.names)).to_batches(max_chunksize=BATCH_ROWS):
        end = start + len(batch)
        arrays = dict(zip(columns.names, map(without_views, batch.columns)))
        if wanted is not None:
            inside = wanted[slice(*np.searchsorted(wanted, [start, end]))] - start
            arrays = {name: array.take(inside) for name, array in arrays.items()}
        start = end
        arrays = _unpadded_batch(arrays)
        for name in columns.pictures:
            arrays[name] = _decoded(arrays[name], part.base.features.get(name))
        yield from map(b"".join, zip(*map(cells, arrays.values())))


def _decoded(stored: Any, feature: Any) -> Iterator[Any]:
    """Yield the pictures of an Arrow array, one at a time; other values as they are."""
    decode = getattr(feature, "decode_example", lambda value: value)
    return (decode(element.as_py()) if element.is_valid else None for element in stored)


def _unpadded(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a row with masked positions dropped from every list of numbers as long as the mask."""
    if TOKENS not in fields or MASK not in fields:
        return fields
    mask = _numbers_in(fields[MASK])
    if mask is None or mask.all():
        return fields
    lists = {name: _numbers_in(value) for name, value in fields.items()}
    return fields | {
        name: row[mask != 0]
        for name, row in lists.items()
        if row is not None and len(row) == len(mask)
    }


def _numbers_in(value: Any) -> np.ndarray | None:
    """Return a one-dimensional list of numbers as an array; None for anything else."""
    if not isinstance(value, (list, tuple, np.ndarray, torch.Tensor)):
        return None
    try:
        array = to_numpy(value)
    except ValueError:  # ragged
        return None
    return array if array.ndim == 1 and array.dtype.kind in "biuf" else None


def _unpadded_batch(arrays: dict[str, Any]) -> dict[str, Any]:
    """Do as ``_unpadded`` for a batch of Arrow arrays by column."""
    import pyarrow as pa

    lists = {
        name: array
        for name, array in arrays.items()
        if is_list(array) and is_number(array.type.value_type)
    }
    if TOKENS not in arrays or MASK not in lists:
        return arrays
    if any(array.null_count or array.flatten().null_count for array in lists.values()):
        rows = map(_unpadded, pa.RecordBatch.from_pydict(lists).to_pylist())
        columns = zip(*(row.values() for row in rows))
        return arrays | dict(zip(lists, columns))
    lengths, kept = (
        lengths_of(lists[MASK]),
        lists[MASK].flatten().to_numpy(zero_copy_only=False) != 0,
    )
    if kept.all():
        return arrays
    for name, array in lists.items():
        same, own = lengths_of(array) == lengths, lengths_of(array)
        keep = np.ones(own.sum(), bool)
        keep[np.repeat(same, own)] = kept[np.repeat(same, lengths)]
        offsets = np.concatenate([[0], np.cumsum(keep)])[np.concatenate([[0], np.cumsum(own)])]
        lists[name] = pa.LargeListArray.from_arrays(offsets, array.flatten().filter(keep))
    return arrays | lists
