"""Labels of classification: public names of the classes, and which class a value of a row means."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hf_dp._validate import invalid
from hf_dp.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

_MOST_ROWS, _MOST_NAMES = 10, 200  # that a message lists


def label_names(dataset: Dataset, label_column: str, given: Sequence[str] | None) -> list[str]:
    """Return the class names: ``given``, else those that the schema of the file declares.

    They are never taken from the rows. A label set read off private rows would itself be a release:
    a class with one member reveals that member. So the subfolders of a folder of images declare
    nothing. The error shows what the rows hold, for the user to decide.

    Raises: DataError when neither is there; InvalidArgumentError for fewer than two names, or a
        name twice.
    """
    require_columns(dataset, [label_column], "label_column")
    if given:
        if len(set(given)) < max(2, len(given)):
            expected = "to name at least two different classes"
            raise invalid("class_names", list(given), expected, "In the order of their ids.")
        return list(given)
    declared = getattr(dataset.features[label_column], "names", None)
    if declared is None or dataset.info.builder_name == "imagefolder":
        raise DataError(
            f"The label column {label_column!r} declares no class names "
            f"({dataset.features[label_column]}). Name them in the configuration, in the order of "
            f"their ids: {_to_paste(dataset, label_column, declared)}"
        )
    return list(declared)


def _to_paste(dataset: Dataset, label_column: str, declared: Sequence[str] | None) -> str:
    """Return a line for the configuration, for this console alone."""
    values = list(declared or dict.fromkeys(dataset.with_format(None)[label_column]))
    whole = all(isinstance(value, int) and not isinstance(value, bool) for value in values)
    if len(values) > _MOST_NAMES or (whole and sorted(values) != list(range(len(values)))):
        return "class_names: [negative, positive]"
    named = (value for value in sorted(values, key=str) if value is not None)
    words = [str(value).lower() if isinstance(value, bool) else str(value) for value in named]
    return (
        f"class_names: {json.dumps(sorted(words, key=int) if whole else words)} (which are those "
        "that the rows hold: check that naming them gives nobody away, and in what order they are)"
    )


def labels_of(names: Sequence[str]) -> dict[str, object]:
    """Return what a configuration says of the classes."""
    return {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {name: index for index, name in enumerate(names)},
    }


def require_columns(dataset: Dataset, columns: list[str], argument: str) -> list[str]:
    """Return the columns. Raises: DataError naming those that are missing."""
    missing = [column for column in columns if column not in dataset.column_names]
    if missing:
        raise DataError(
            f"`{argument}` names {missing}, but the data has the columns {dataset.column_names}. "
            f"Set `{argument}` to columns that are there."
        )
    return columns


def require_texts(dataset: Dataset, columns: list[str]) -> None:
    """Raise DataError for missing columns, or naming the rows that hold no text in them."""
    for column in require_columns(dataset, columns, "text_columns"):
        texts = dataset.with_format(None)[column]
        bad = {row: text for row, text in enumerate(texts) if not isinstance(text, str)}
        if bad:
            raise DataError(
                f"The text column {column!r} holds no text: {_held(bad)}. Fill or leave out such "
                "rows."
            )


def checked_names(
    sets: Mapping[str, Dataset],
    text_columns: Sequence[str],
    label_column: str,
    given: Sequence[str] | None,
) -> list[str]:
    """Return the class names as :func:`label_names` of the first set, where all rows are right.

    Args: sets: what the rows are called in messages, and the rows.

    Raises: DataError that lists all that is wrong in all sets; InvalidArgumentError.
    """
    problems: list[str] = []
    names: list[str] = []
    with _noted(problems):
        names = label_names(next(iter(sets.values())), label_column, given)
    for which, rows in sets.items():
        for column in text_columns:
            with _noted(problems, f"{which}: "):
                require_texts(rows, [column])
        if names:
            with _noted(problems, f"{which}: "):
                label_ids(rows, label_column, names)
    if problems:
        raise DataError("\n".join(problems))
    return names


@contextmanager
def _noted(problems: list[str], where: str = "") -> Iterator[None]:
    """Add what a DataError says to the problems, and go on."""
    try:
        yield
    except DataError as problem:
        problems.append(f"{where}{problem}")


def _held(values: Mapping[int, object]) -> str:
    """Return what rows hold, to read, of the first ones."""
    shown = [f"row {row} holds {value!r}" for row, value in [*values.items()][:_MOST_ROWS]]
    more = len(values) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def label_ids(dataset: Dataset, label_column: str, names: Sequence[str]) -> list[int]:
    """Return the class id of each row, for ids or names; no other column is read.

    Ids of a column that declares class names stand for these names, in whatever order they are.
    False and true are the classes of these names, or of two classes the first and the second.

    Raises: DataError for a missing column, or naming the rows outside the classes;
        InvalidArgumentError for names that are other numbers than the ids of the column.
    """
    require_columns(dataset, [label_column], "label_column")
    feature = dataset.features[label_column]
    declared = getattr(feature, "names", None)
    if declared is None and "int" in str(getattr(feature, "dtype", "")):
        _refuse_other_numbers(names, label_column)
    meanings = _meanings(names, declared)
    values = dataset.with_format(None)[label_column]
    found = [meanings.get((type(v), v)) if isinstance(v, (str, int)) else None for v in values]
    outside = {row: values[row] for row, label in enumerate(found) if label is None}
    if outside:
        ids = f" (ids 0 to {len(names) - 1})" if declared is None else f"; it declares {declared}"
        raise DataError(
            f"The label column {label_column!r} has a value outside the classes {list(names)}"
            f"{ids}: {_held(outside)}. Correct the row or leave it out, or set `class_names`."
        )
    return [label for label in found if label is not None]


def _meanings(
    names: Sequence[str], declared: Sequence[str] | None
) -> dict[tuple[type, object], int]:
    """Return the class id that each value means, by its type and itself (True is no 1)."""
    ids = {name: index for index, name in enumerate(names)}
    of_ids = names if declared is None else declared
    words = [name.lower() for name in names]
    truths = {value: words.index(word) for value, word in _TRUTHS.items() if word in words}
    if not truths and len(names) == 2:
        truths = {False: 0, True: 1}
    return {
        **{(str, name): index for name, index in ids.items()},
        **{(int, index): ids[name] for index, name in enumerate(of_ids) if name in ids},
        **{(bool, value): index for value, index in truths.items()},
    }


_TRUTHS = {False: "false", True: "true"}


def _refuse_other_numbers(names: Sequence[str], column: str) -> None:
    """Raise InvalidArgumentError for a class that is called by another number than its id."""
    for index, name in enumerate(names):
        if re.fullmatch(r"[-+]?\d+(\.\d*)?", name.strip()) and float(name) != index:
            raise invalid(
                "class_names",
                list(names),
                f"to agree with the whole numbers of the column {column!r}, which count from 0",
                f"Rows that hold {index} would be called {name!r}. Put the names in the order of "
                "the numbers; where these do not begin at 0, write words into the column instead.",
            )
