"""Whether evaluation rows are training rows, and which training rows are equal to each other.

Rows are compared by what they hold, as digests under a key that never leaves the process, and rows
of one object by their index in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np
import pyarrow
import torch
from pyarrow import types
from torch.utils.data import ConcatDataset, IterableDataset, Subset
from transformers.utils import logging

from hf_dp.batches.structure import DataSet, Row, Value, is_picture
from hf_dp.batches.units import UnitTable, unit_values
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.noise import untouched_generators
from hf_dp.plans.dp_sgd import MEAN_RUNS

logger = logging.get_logger(__name__)

Columns = dict[str, list[Value]]

# A column with this share of distinct values tells rows apart. At most 2 (1 - 0.95) of its rows
# have a twin in it, and so, by chance, at most a tenth of held-out rows.
MOST_DISTINCT, LARGEST_SHARE = 0.95, 0.1
_BESIDE_CONTENT = re.compile(
    r"masks?$|type_ids$|(?<!com)(?<!dis)(?<!ex)(?<!pro)position|offset"
    r"|(^|_)(id|idx|index|guid|uid|word_ids)$",
    re.IGNORECASE,
)
_LABELS = re.compile(r"(^|_)(labels?|label_ids)$", re.IGNORECASE)
_NUMBER, _NUMBERS, _TEXT, _PICTURE, UNSTEADY = range(5)  # kinds of columns
_MASK, _AT_ONCE, _FIRST, _SHOWN = "attention_mask", 256, 8, 10  # rows at a time, to see, to name


def _places(dataset: DataSet, known: list[DataSet]) -> np.ndarray:
    """Return a number for each row, one for each index of each object; ``known`` grows."""
    if isinstance(dataset, Subset):
        return _places(dataset.dataset, known)[np.asarray(dataset.indices, np.int64)]
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([_places(each, known) for each in dataset.datasets])
    number = [each is dataset for each in (*known, dataset)].index(True)
    known += [dataset] if number == len(known) else []
    return (number << 40) + np.arange(len(dataset) if _is_sized(dataset) else 0)


def _is_sized(dataset: DataSet) -> bool:
    return hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)


def parts_of(dataset: DataSet) -> list[DataSet]:
    """Return, in their order, the data sets with rows that a data set is made of."""
    if type(dataset) is ConcatDataset:
        return [part for each in dataset.datasets for part in parts_of(each)]
    if type(dataset) is Subset and isinstance(dataset.dataset, datasets.Dataset):
        indices = np.asarray(dataset.indices, np.int64)
        dataset = dataset.dataset.select(indices % max(1, len(dataset.dataset)))
    return [] if _is_sized(dataset) and not len(dataset) else [dataset]


def _chunks(part: DataSet, most: int, names: Collection[str] = ()) -> Iterator[Columns]:
    """Yield some rows at a time, as lists by column (those of these names), as they were before any
    transform of the user's."""
    if isinstance(part, datasets.Dataset):
        known = [name for name in part.column_names if not names or name in names]
        for table in part.with_format("arrow", columns=known).iter(most):
            yield {name: _values(table.column(name).combine_chunks()) for name in known}
        return
    rows = (part[at] for at in range(len(part))) if _is_sized(part) else iter(part)
    while chunk := [_fields(row) for row in islice(rows, most)]:
        yield {name: [row.get(name) for row in chunk] for name in names or chunk[0]}


def _fields(row: Row) -> Mapping[str, Value]:
    """Return a row's values by column; a tuple's are numbered, without scalars (labels, ids)."""
    if isinstance(row, Mapping):
        return row
    several = isinstance(row, tuple) or (isinstance(row, list) and any(map(_kind, row)))
    return {str(at): value for at, value in enumerate(row if several else [row]) if _kind(value)}


def _values(array: pyarrow.Array) -> list[Value]:
    """Return the elements of an Arrow array, lists of numbers as arrays."""
    if types.is_list(array.type) and not array.null_count:
        inner = array.flatten()
        if (types.is_integer(inner.type) or types.is_floating(inner.type)) and not inner.null_count:
            return list(array.to_numpy(zero_copy_only=False))
    return array.to_pylist()


def _kind(value: Value) -> int:
    """Return whether a value is one number (or unknown), several, text, or a picture."""
    if isinstance(value, (list, tuple)):
        return max(_NUMBER, _NUMBERS, *map(_kind, value[:_FIRST]))
    if is_picture(value):
        return _PICTURE
    if isinstance(value, (str, bytes, Mapping)):
        return _TEXT
    return _NUMBERS if getattr(value, "ndim", 0) else _NUMBER


def encode(value: Value) -> bytes:
    """Return a value as bytes, the same in any container (floats as float32, as torch has them)."""
    if isinstance(value, str):
        return _sized(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, (bytes, bytearray)):
        return _sized(b"b", value)
    if isinstance(value, Mapping):
        if value.keys() == {"bytes", "path"}:  # a stored picture, wherever it is kept
            content, path = value["bytes"], Path(value["path"] or "")
            return encode(path.read_bytes() if content is None and path.is_file() else content)
        items = sorted((str(name), each) for name, each in value.items() if each is not None)
        return _sized(b"d", b"".join(encode(name) + encode(each) for name, each in items))
    numbers = _as_array(value)
    if numbers is None:
        if is_picture(value):
            return b"p" + encode([value.mode, *value.size, value.tobytes()])
        if isinstance(value, (list, tuple, np.ndarray)):
            return _sized(b"l", b"".join(map(encode, value)))
        return _sized(b"?", f"{type(value).__name__} {value}".encode())  # None, dates, decimals
    if numbers.dtype.kind != "f" or not numbers.size:
        return _sized(b"i%r" % (numbers.shape,), numbers.astype("<i8", copy=False).tobytes())
    with np.errstate(over="ignore"):  # -0.0 is 0.0
        content = (numbers.astype("<f4", copy=False) + np.float32(0)).tobytes()
    return _sized(b"f%r" % (numbers.shape,), content)


def _sized(tag: bytes, content: bytes | bytearray) -> bytes:
    return tag + len(content).to_bytes(8, "little") + content


def _as_array(value: Value) -> np.ndarray | None:
    """Return numbers as an array; None for anything else, and for lists of unequal lengths."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().float() if value.is_floating_point() else value.cpu()
    elif not isinstance(value, np.ndarray) and _kind(value) > _NUMBERS:
        return None  # else long texts would be copied
    try:
        array = np.asarray(value)
        array = np.asarray(array.tolist()) if array.dtype == object and array.ndim else array
    except (ValueError, TypeError, RuntimeError):
        return None
    return array if array.dtype.kind in "biuf" else None


def _unpad(chunk: Columns) -> None:
    """Drop masked positions from lists of numbers as long as the mask."""
    arrays = [mask for mask in chunk[_MASK] if isinstance(mask, np.ndarray)]
    if len(arrays) == len(chunk[_MASK]) and np.concatenate(arrays).all():
        return
    for row, value in enumerate(chunk[_MASK]):
        mask = _as_array(value)
        if mask is not None and mask.ndim == 1 and not mask.all():
            for name in chunk.keys() - {_MASK}:
                array = _as_array(chunk[name][row])
                if array is not None and array.shape == mask.shape:
                    chunk[name][row] = array[mask != 0]


def columns_of(part: DataSet) -> dict[str, int]:
    """Return the kinds of a data set's columns, as a few rows show them; none without rows."""
    first = next(_chunks(part, _FIRST), {})
    stored = isinstance(part, datasets.Dataset)  # (before its transform: each reading is the same)
    again = first if stored else next(_chunks(part, _FIRST), {})
    steady = {n: list(map(encode, v)) == list(map(encode, again[n])) for n, v in first.items()}
    return {n: max(map(_kind, v)) if steady[n] else UNSTEADY for n, v in first.items()}


def _content(*sets: DataSet) -> dict[str, int]:
    """Return what all data sets have of content and of labels of more than one number."""
    found = [columns_of(part) for each in sets for part in parts_of(each)]
    names = [name for name in found[0] if all(name in each for each in found)]
    kinds = {n: max(each[n] for each in found) for n in names if not _BESIDE_CONTENT.search(n)}
    return {name: kind for name, kind in kinds.items() if kind or not _LABELS.search(name)}


def digests(dataset: DataSet, columns: Mapping[str, int], key: bytes) -> dict[str, np.ndarray]:
    """Return digests of the values, by column. Pictures are compared by their pixels."""
    found: dict[str, list[bytes]] = {name: [] for name in columns}
    for part in parts_of(dataset):
        features = getattr(part, "features", None) or {}
        for chunk in _chunks(part, _AT_ONCE, {*columns, _MASK}):
            if _MASK in chunk:
                _unpad(chunk)
            for name, kind in columns.items():
                values, decode = chunk[name], getattr(features.get(name), "decode_example", None)
                if kind == _PICTURE and decode is not None:
                    values = [decode(v) if isinstance(v, Mapping) else v for v in values]
                for value in values:
                    found[name].append(blake2b(encode(value), digest_size=8, key=key).digest())
    return {name: np.frombuffer(b"".join(each), np.uint64) for name, each in found.items()}


class Overlap(NamedTuple):
    """Which rows of an evaluation set equal training rows, by which columns, and what follows."""

    rows: int
    equal: np.ndarray = np.zeros(0, np.int64)
    by: str = ""
    refused: bool = False
    comparable: bool = True

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.equal[:_SHOWN].tolist()))
        more = f" and {len(self.equal) - _SHOWN:,} more" if len(self.equal) > _SHOWN else ""
        return f"{len(self.equal):,} of {self.rows:,}, by {self.by}: {shown}{more}"


class _Training:
    """What no evaluation set may share with a training set; in words: shares, unknown, move."""

    shares = unknown = move = ""
    _compare: Callable[[DataSet], Overlap]

    def __init__(self) -> None:
        self._seen: list[tuple[DataSet, Overlap]] = []

    def compare(self, evaluation: DataSet) -> Overlap:
        """Return what a set shares with the training set. One that cannot grow is read once."""
        for each, found in self._seen:
            if each is evaluation and not isinstance(each, list):
                return found
        with untouched_generators():
            self._seen.append((evaluation, self._compare(evaluation)))
        return self._seen[-1][1]

    def refuse(self, evaluation: DataSet, *, search: bool = False) -> bool:
        """Return whether all evaluation sets, one or several by name, could be compared.

        A few shared rows are warned of once. In a private ``search`` one is too many, and so is a
        set that cannot be compared: the score that selects a run may read no training row.

        Raises: UnsupportedArgumentError names the set, if it has a name, and the rows.
        """
        named = evaluation if isinstance(evaluation, Mapping) else {"": evaluation}
        seen, comparable = [each for each, _ in self._seen], True
        for name, each in [(name, each) for name, each in named.items() if each is not None]:
            found, which = self.compare(each), f"the evaluation set{f' {name!r}' if name else ''}"
            comparable &= found.comparable
            shares = f"{which} {self.shares} ({found})"
            if search and (found.equal.size or not found.comparable):
                shares = f"{shares}. {self.move}" if found.comparable else f"{which} {self.unknown}"
                raise UnsupportedArgumentError(
                    f"With {MEAN_RUNS}, the score that selects a run must read no training row, "
                    f"but {shares}, or leave {MEAN_RUNS} out."
                )
            if found.refused:
                raise UnsupportedArgumentError(
                    f"Expected an evaluation set other than the training set, but {shares}: "
                    "metrics are computed without noise, and epsilon would not cover what they "
                    f"say about private rows. {self.move}, or set evaluate_on_training_rows=True: "
                    "the metrics are then a release that the card names."
                )
            if found.equal.size and not any(each is known for known in seen):
                logger.warning(f"Note that {shares}. Epsilon does not cover metrics on these rows.")
        return comparable


class TrainingUsers(_Training):
    """The users of a training set. Args: table: whose the training rows are."""

    def __init__(self, table: UnitTable):
        super().__init__()
        self.table, self.shares = table, f"has rows of the same values in {table.column!r}"
        self.unknown = f"does not say whose its rows are. Keep the column {table.column!r} in it"
        self.move = f"Split by {table.column!r}"

    def _compare(self, evaluation: DataSet) -> Overlap:
        if (values := unit_values(evaluation, self.table.column)) is None:
            return Overlap(0, comparable=False)
        equal, by = self.table.shared(values), f"`{self.table.column}`"
        return Overlap(len(values), equal, by, len(equal) > LARGEST_SHARE * len(values))


class TrainingRows(_Training):
    """The rows of a training set, read when first needed."""

    shares, move = "holds rows equal to training rows", "Pass a held-out set, without these rows"
    unknown = (
        "cannot be compared with the training rows: they have no column in common, or each "
        "reading gives another row. Give both sets the same columns, without random transforms"
    )

    def __init__(self, dataset: DataSet) -> None:
        super().__init__()
        self.dataset, self._key = dataset, os.urandom(32)
        self._read: dict[tuple[tuple[str, int], ...], dict[str, np.ndarray]] = {}

    def repeats(self) -> tuple[int, str]:
        """Return how many training rows are equal at the most, and what was compared."""
        with untouched_generators():
            rows, by = _places(self.dataset, []), "their index"
            if (kinds := _content(self.dataset)) and UNSTEADY not in kinds.values():
                rows, by = _together(self._digests(kinds), kinds), _words(kinds)
        return int(np.unique(rows, return_counts=True)[1].max(initial=1)), by

    def _digests(self, columns: Mapping[str, int]) -> dict[str, np.ndarray]:
        asked = tuple(sorted(columns.items()))
        if asked not in self._read:
            self._read[asked] = digests(self.dataset, columns, self._key)
        return self._read[asked]

    def _compare(self, evaluation: DataSet) -> Overlap:
        """Compare by index in one object, by each column alone, by all texts, by everything. Rows
        that are only iterated are not read for it."""
        if isinstance(self.dataset, IterableDataset):
            return Overlap(0, comparable=False)
        known: list[DataSet] = []
        mine, its = _places(self.dataset, known), _places(evaluation, known)
        if (same := np.flatnonzero(np.isin(its, mine))).size:
            return Overlap(len(its), same, "their index in train_dataset", refused=True)
        common = _content(self.dataset, evaluation)
        kinds = {name: kind for name, kind in common.items() if kind != UNSTEADY}
        if not kinds:
            return Overlap(len(its), comparable=False)
        sets = self._digests(kinds), digests(evaluation, kinds, self._key)
        alone = [(name,) for name, kind in kinds.items() if kind and not _LABELS.search(name)]
        texts = tuple(name for (name,) in alone if kinds[name] >= _TEXT)
        rows = [_together(each, kinds) for each in sets]
        first = [np.unique(each, return_index=True)[1] for each in rows]
        hits, by, refused = np.zeros(len(rows[1]), bool), set[str](), False
        for group in {*alone, texts, everything := tuple(kinds)} - {()}:
            both = [_together(each, group) for each in sets]
            ours, theirs = (np.unique(b[at], return_counts=True)[1] for b, at in zip(both, first))
            equal, allowed = np.isin(both[1], both[0]), LARGEST_SHARE
            repeats = any(len(each) < MOST_DISTINCT * each.sum() for each in (ours, theirs))
            if repeats and (group != everything or kinds != common):
                # By chance, texts are as often equal as in the training set itself.
                allowed += ours[ours > 1].sum() / ours.sum() if group == texts else np.inf
            if equal.sum() > allowed * len(equal) or allowed == LARGEST_SHARE and equal.any():
                refused = refused or equal.sum() > allowed * len(equal)
                hits, by = hits | equal, by | {_words(group)}
        return Overlap(len(hits), np.flatnonzero(hits), " or ".join(sorted(by)), bool(refused))


def _together(of: Mapping[str, np.ndarray], names: Collection[str]) -> np.ndarray:
    """Return one digest for each row, over several columns."""
    return np.add.reduce([of[name] * np.uint64(2 * at + 1) for at, name in enumerate(names)])


def _words(columns: Collection[str]) -> str:
    return " and ".join(f"`{name}`" for name in columns)
