"""The leaves of what a data collator returns, by name, and what those of all examples share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hf_dp.errors import DataError

DataSet = Any  # with len and [i], or one that can only be iterated
Row = Any  # of a data set, in whatever form it has
Value = Any  # of a row's column
Example = Any  # a collated batch of one: tensors of shape (1, ...) in mappings, tuples and lists
Batch = Any  # the same of several examples
Combine = Callable[[str, list[Any]], object]  # makes one leaf of those of several examples


_CONTAINERS = (Tensor, np.ndarray, Mapping, list, tuple)


class Rows(Protocol):
    """A data set, whose rows are known by their place."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Row: ...


def is_picture(value: object) -> bool:
    """Return whether a value is a PIL image."""
    library = sys.modules.get("PIL.Image")
    return library is not None and isinstance(value, library.Image)


def own(collated: object, name: str = "") -> Example:
    """Return the collated value with plain containers, and arrays as tensors, or raise DataError. A
    list of plain values (texts, numbers, None) stays a list: one value for each example."""
    if isinstance(collated, Tensor):
        return collated.detach()
    if isinstance(collated, np.ndarray) and collated.dtype != object:
        return torch.from_numpy(collated)
    if isinstance(collated, Mapping):
        return {str(key): own(value, _join(name, key)) for key, value in collated.items()}
    if isinstance(collated, (list, tuple)):
        if isinstance(collated, list) and not any(
            isinstance(value, _CONTAINERS) for value in collated
        ):
            return [_plain(value, name) for value in collated]
        return tuple(own(value, _join(name, place)) for place, value in enumerate(collated))
    return _plain(collated, name)


def leaves(example: Example, name: str = "") -> Iterator[tuple[str, Example]]:
    """Yield (dotted name, leaf) of a value from :func:`own`; a list of plain values is a leaf."""
    if not isinstance(example, (dict, tuple)):
        yield name, example
        return
    for key, value in example.items() if isinstance(example, dict) else enumerate(example):
        if isinstance(value, (dict, tuple)):
            yield from leaves(value, _join(name, key))
        else:  # the usual case, for which a generator each would take half of the time
            yield _join(name, key), value


def numbers(example: Example) -> int:
    """Return how many numbers the tensors of an example have together."""
    return sum(leaf.numel() for _, leaf in leaves(example) if isinstance(leaf, Tensor))


def combined(examples: list[Example], combine: Combine, name: str = "") -> Batch:
    """Return one structure like all of ``examples``, each leaf combined from theirs."""
    first = examples[0]

    def inside(key: object) -> Batch:
        return combined([each[key] for each in examples], combine, _join(name, key))

    if isinstance(first, dict):
        return {key: inside(key) for key in first}
    if isinstance(first, tuple):
        return tuple(inside(place) for place in range(len(first)))
    return combine(name, examples)


def column(name: str) -> str:
    """Return the last part of a dotted name."""
    return name.rpartition(".")[2]


def _join(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _plain(value: object, name: str) -> object:
    if value is None or isinstance(value, (str, bytes, bool, int, float)):
        return value
    raise DataError(
        f"The data collator returns a {type(value).__name__} as `{name or 'the batch'}`. Expected "
        "tensors, arrays, texts, numbers or None, in mappings, tuples or lists. Convert it, or "
        "leave it out of what the collator returns."
    )


# -- names, types and shapes, and where examples differ --


@dataclass
class Leaf:
    """One tensor of every example, of shape (1, ...), or a plain value, of which ``dtype`` is the
    kind; with the smallest and largest size of each dimension seen."""

    dtype: str
    least: tuple[int, ...] = ()
    most: tuple[int, ...] = ()
    is_tensor: bool = True

    @property
    def varying(self) -> tuple[int, ...]:
        """The dimensions in which examples differ."""
        return tuple(
            place for place, (low, high) in enumerate(zip(self.least, self.most)) if low != high
        )


@dataclass
class Layout:
    """The leaves by dotted name, which :meth:`add` fills and :meth:`check` compares with."""

    leaves: dict[str, Leaf] = field(default_factory=dict)

    @property
    def varies(self) -> bool:
        """Whether examples differ in any size."""
        return any(leaf.varying for leaf in self.leaves.values())

    def add(self, example: Example) -> None:
        """Take an example into account. DataError: it differs in more than lengths."""
        found = {name: _leaf(value) for name, value in leaves(example)}
        if not self.leaves:
            self.leaves = found
            return
        self._refuse_other(found)
        for name, leaf in found.items():
            known = self.leaves[name]
            if leaf.least != known.least or leaf.most != known.most:
                known.least = tuple(map(min, known.least, leaf.least))
                known.most = tuple(map(max, known.most, leaf.most))

    def check(self, example: Example) -> None:
        """Raise DataError if names, types or numbers of dimensions differ from the others'."""
        self._refuse_other({name: _leaf(value) for name, value in leaves(example)})

    def _refuse_other(self, found: dict[str, Leaf]) -> None:
        if found.keys() != self.leaves.keys():
            missing = sorted(self.leaves.keys() - found.keys())
            extra = sorted(found.keys() - self.leaves.keys())
            differs = [f"it lacks {missing}"] * bool(missing) + [f"it adds {extra}"] * bool(extra)
            raise DataError(
                f"collated, it has other columns than the first row: {' and '.join(differs)}. Give "
                "all rows the same columns."
            )
        for name, leaf in found.items():
            known = self.leaves[name]
            if leaf.dtype != known.dtype or len(leaf.least) != len(known.least):
                raise DataError(
                    f"`{name}` is {_describe(leaf)}, but {_describe(known)} in the first row. Give "
                    "all rows the same type and number of dimensions."
                )


def _leaf(value: object) -> Leaf:
    if isinstance(value, Tensor):
        shape = tuple(value.shape)
        return Leaf(str(value.dtype).removeprefix("torch."), shape, shape)
    # The values of a list may differ in kind between examples; no stock model takes it as input.
    return Leaf("a list of values" if isinstance(value, list) else repr(value), is_tensor=False)


def _describe(leaf: Leaf) -> str:
    kind = f"a tensor of {leaf.dtype} with {len(leaf.least)} dimensions"
    return kind if leaf.is_tensor else leaf.dtype
