"""The rows of a training set, each fetched and collated alone, with its own randomness.

By construction no row sees another here: the data collator gets one row at a time, in a state in
which no other row has left a trace. Only padding (:mod:`hf_dp.batches.padding`) treats several
examples together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import datasets
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from hf_dp.batches.isolation import Isolated
from hf_dp.batches.padding import LABELS
from hf_dp.batches.structure import Example, Row, Rows, is_picture, leaves, own
from hf_dp.errors import DataError
from hf_dp.noise import SecretRandomness

Collator = Callable[[list[Row]], object]
T = TypeVar("T")

# Rows fetched at once: switching the generators to the private streams and back takes longer than
# collating a row.
_CHUNK = 256
_TEXT = ("string", "large_string")


class Examples(Dataset[Example]):
    """Example i is what the collator makes of row i alone: tensors of shape (1, ...)."""

    removed: list[str] | None = None  # text that no forward takes; None where all columns are kept

    def __init__(self, dataset: Rows, collator: Collator, randomness: SecretRandomness):
        self.randomness = randomness
        self.collator, self.dataset = collator, dataset
        self.reads, self.collates = Isolated(dataset, has_rows=True), Isolated(collator)
        is_custom = not isinstance(dataset, datasets.Dataset) or dataset.format["type"] == "custom"
        self._rows_are_fresh = not is_custom

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def reached(self) -> list[object]:
        """The data sets that collator and transform reach."""
        return [*self.collates.data, *self.reads.data]

    def __getitem__(self, index: int) -> Example:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Example]:
        with self._private():
            return [self._example(index) for index in indices]

    def each(self, indices: Sequence[int], look: Callable[[Callable[[], Example]], T]) -> list[T]:
        """Return what ``look`` makes of reading each of the rows, which may raise DataError."""
        with self._private():
            return [look(partial(self._example, index)) for index in indices]

    def _example(self, index: int) -> Example:
        return self._collated(self._row(index), self.name(index))

    def name(self, index: int) -> str:
        """Return what errors call an example: its row, or the rows of its group."""
        rows = getattr(self.dataset, "rows_per_group", 1)
        which = f"Row {index}" if rows == 1 else f"Rows {index * rows} to {(index + 1) * rows - 1}"
        return f"{which} of the training set"

    def row(self, index: int) -> Row:
        """Return a row of the data set, as the collator gets it."""
        with self._private():
            return self._row(index)

    def collate(self, row: Row) -> Example:
        """Return what the collator makes of a row that does not come from the data set."""
        with self._private():
            return self._collated(row, "A synthetic row")

    def all(self, count: int | None = None) -> Iterator[Example]:
        """Yield all examples in order, or the first ``count``; a few are in memory at a time."""
        end = len(self) if count is None else count
        for first in range(0, end, _CHUNK):
            yield from self.__getitems__(range(first, min(first + _CHUNK, end)))

    @contextmanager
    def _private(self) -> Iterator[None]:
        if get_worker_info() is not None:  # a worker process uses its generators for nothing else
            yield
        else:
            with self.randomness.streams():
                yield
                self.randomness.reseed()  # do not continue where the last example stopped

    def _row(self, index: int) -> Row:
        # If rows shared a generator, one row could shift what later rows get, and a collator that
        # seeds the global generators would determine what its neighbors get.
        self.randomness.reseed(index)
        try:
            with self.reads.fresh() as dataset:
                row = dataset[index]
        except MemoryError:
            raise
        except Exception as problem:  # a damaged file, a transform that fails
            of_columns = (
                " If a transform needs a column that the model's forward does not take, set "
                "remove_unused_columns=False."
            )
            raise DataError(
                f"{self.name(index)} cannot be read ({type(problem).__name__}: {problem}). Repair "
                f"it, or leave it out.{'' if self.removed is None else of_columns}"
            ) from problem
        # A collator may pop columns or write into lists, which rows of the data set may share.
        return row if self._rows_are_fresh else _copied(row, self.name(index))

    def _why_not_collated(self, row: Row) -> str:
        columns = _columns(row)
        texts = [name for name, value in columns.items() if isinstance(value, str)]
        pictures = [name for name, value in columns.items() if is_picture(value)]
        found = texts or self.removed
        is_row = isinstance(row, dict) and "input_ids" not in row
        if found and is_row and _pads_tokens(self.collator):
            name = repr(found[0]) if len(found) == 1 else "NAME"
            return (
                f"The rows are not tokenized: they have text in {found}, and no `input_ids`. Use "
                f"data.map(lambda rows: tokenizer(rows[{name}]), batched=True)"
                f"{'.' if len(found) == 1 else ', where NAME is the text to read.'}"
            )
        said = [
            "The data collator is called with a list of one row, so that no row sees another; the "
            "library pads. It must work on one."
        ]
        if isinstance(row, list):
            said.append(
                f"With rows_per_group a row is a list of {len(row)} rows, which stock collators do "
                "not take: pass your own."
            )
        if pictures:
            said.append(
                f"It cannot take the images in {pictures}: let a transform make `pixel_values` "
                "with the model's image processor (dataset.with_transform), and leave them out."
            )
        if self.removed is not None:
            said.append(
                "If it misses a column, set remove_unused_columns=False: otherwise only columns "
                "that the model's forward takes are kept."
            )
        elif texts:
            said.append(
                f"If it cannot take the text in {texts}, remove it (dataset.remove_columns("
                f"{texts})), or leave remove_unused_columns at True."
            )
        return " ".join(said)

    def _collated(self, row: Row, which: str) -> Example:
        try:
            with self.collates.fresh() as collator:
                example = own(collator([row]))
        except Exception as problem:
            refuse_words_as_label(row, which)
            why = self._why_not_collated(row)
            raise DataError(
                f"{which}, collated alone, failed ({type(problem).__name__}: {problem}). {why}"
            ) from problem
        for name, leaf in leaves(example):
            if not _is_one_example(leaf):
                shape = tuple(leaf.shape) if isinstance(leaf, Tensor) else (len(leaf),)
                raise DataError(
                    f"{which}, collated alone, gives `{name}` of shape {shape}. Expected one "
                    "example: a first dimension of 1. Use a collator that returns one row for "
                    "each row. (Models like Qwen-VL put the patches of all rows into one "
                    "dimension: train them on text alone.)"
                )
        return example


def _pads_tokens(collator: object) -> bool:
    """Return whether a collator is one of transformers' that pad what a tokenizer returns."""
    inner = getattr(collator, "data_collator", collator)  # transformers wraps one to remove columns
    takes = getattr(getattr(inner, "tokenizer", None), "model_input_names", ())
    return type(inner).__module__.startswith("transformers.") and "input_ids" in takes


def texts_in(dataset: Rows) -> list[str]:
    """Return the columns of text of a table."""
    known = dataset.features if isinstance(dataset, datasets.Dataset) else {}
    return [name for name, kind in known.items() if getattr(kind, "dtype", "") in _TEXT]


def refuse_words_as_label(row: Row, which: str) -> None:
    """Raise DataError if the label of a row is text, which some collators drop."""
    for name in LABELS:
        if isinstance(value := _columns(row).get(name), str):
            raise DataError(
                f"{which} has the text {value!r} as `{name}`, but models take class ids. Use "
                f"dataset.cast_column({name!r}, datasets.ClassLabel(names=[...])) (with hf-dp, set "
                "class_names), or let the transform that makes it return class ids."
            )


def _columns(row: Row) -> dict[str, object]:
    return row if isinstance(row, dict) else {}


def _is_one_example(leaf: object) -> bool:
    """Return whether a tensor or list has a first dimension of 1; a plain value is one example."""
    if isinstance(leaf, Tensor):
        return leaf.dim() > 0 and leaf.shape[0] == 1
    return not isinstance(leaf, list) or len(leaf) == 1


def _copied(row: Row, which: str) -> Row:
    try:
        return copy.deepcopy(row)
    except Exception as problem:
        raise DataError(
            f"{which} cannot be copied ({problem}), so a collator could "
            "change what other rows share with it. Let rows hold only values, tensors and images."
        ) from problem
