"""Labels of classification: public names of the classes, and which class a value of a row means."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hf_dp._validate import invalid
from hf_dp.errors import DataError

_MOST_ROWS, _MOST_NAMES = 10, 200  # that a message lists


def label_names(dataset: Any, label_column: str, given: Sequence[str] | None) -> list[str]:
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


def _to_paste(dataset: Any, label_column: str, declared: Sequence[str] | None) -> str:
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


def require_columns(dataset: Any, columns: Sequence[str], argument: str) -> None:
    """Raise DataError naming the columns that are missing and those that are there."""
    missing = [column for column in columns if column not in dataset.column_names]
    if missing:
        raise DataError(
            f"`{argument}` names {missing}, but the data has the columns {dataset.column_names}. "
            f"Set `{argument}` to columns that are there."
        )


def checked_names(
    sets: Mapping[str, Any],
    text_columns: Sequence[str],
    label_column: str,
    given: Sequence[str] | None,
) -> list[str]:
    """Return the class names as :func:`label_names` of the first set, where all rows are right.

    Args: sets: what the rows are called in messages, and the rows.

    Raises: DataError that lists all that is wrong in all sets; InvalidArgumentError.
    """
    problems: list[str] = []
    names, first = None, next(iter(sets.values()))
    if label_column in first.column_names:
        try:
            names = label_names(first, label_column, given)
        except DataError as problem:
            problems.append(str(problem))
    for which, rows in sets.items():
        found = row_problems(rows, text_columns, label_column, names)
        problems += [f"{which}: {problem}" for problem in found]
    if problems or names is None:
        raise DataError("\n".join(problems))
    return names


def row_problems(
    dataset: Any, text_columns: Sequence[str], label_column: str, names: Sequence[str] | None
) -> list[str]:
    """Return all that keeps rows from being encoded: columns, texts and labels."""

    def said(check: Any, *args: Any) -> list[str]:
        try:
            check(dataset, *args)
        except DataError as problem:
            return [str(problem)]
        return []

    there = dataset.column_names
    problems = said(require_columns, text_columns, "text_columns")
    problems += said(require_columns, [label_column], "label_column")
    for column in text_columns:
        problems += said(_require_texts, column) if column in there else []
    if names is not None and label_column in there:
        problems += said(label_ids, label_column, names)
    return problems


def _require_texts(dataset: Any, column: str) -> None:
    texts = dataset.with_format(None)[column]
    bad = {row: text for row, text in enumerate(texts) if not isinstance(text, str)}
    if bad:
        raise DataError(
            f"The text column {column!r} holds no text: {_held(bad)}. Fill or leave out such rows."
        )


def _held(values: Mapping[int, Any], called: Mapping[int, str] = MappingProxyType({})) -> str:
    """Return what rows hold, to read, of the first ones."""
    shown = [
        f"row {row} holds {value!r}{called.get(value, '') if isinstance(value, int) else ''}"
        for row, value in list(values.items())[:_MOST_ROWS]
    ]
    more = len(values) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def label_ids(dataset: Any, label_column: str, names: Sequence[str]) -> list[int]:
    """Return the class id of each row, for ids or names; no other column is read.

    Ids of a column that declares class names stand for these names, in whatever order they are.
    True and false stand for the classes of these names, in upper or lower case, else for the second
    and the first of two.

    Raises: DataError for a missing column, or naming the rows outside the classes;
        InvalidArgumentError for names that are other numbers than the ids of the column.
    """
    require_columns(dataset, [label_column], "label_column")
    declared = getattr(dataset.features[label_column], "names", None)
    if declared is None and "int" in str(getattr(dataset.features[label_column], "dtype", "")):
        _refuse_other_numbers(names, label_column)
    values = dataset.with_format(None)[label_column]
    ids = {name: index for index, name in enumerate(names)}
    truth = _truth_values(names)
    found = [_label_id(value, ids, declared, truth) for value in values]
    outside = {row: values[row] for row, label in enumerate(found) if label is None}
    if outside:
        called = {i: f", which the data calls {name!r}" for i, name in enumerate(declared or ())}
        raise DataError(
            f"The label column {label_column!r} has a value outside the classes {list(ids)}"
            f"{'' if declared else f' (ids 0 to {len(ids) - 1})'}: {_held(outside, called)}. "
            "Correct the row or leave it out, or set `class_names`"
            f"{f' to names out of {list(declared)}' if declared else ''}."
        )
    return [label for label in found if label is not None]


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


def _truth_values(names: Sequence[str]) -> dict[bool, int]:
    """Return the class ids of false and true, as far as there are such classes."""
    words = [name.lower() for name in names]
    named = {
        value: words.index(word) for value in (False, True) if (word := str(value).lower()) in words
    }
    return named or ({False: 0, True: 1} if len(names) == 2 else {})


def _label_id(
    value: Any, ids: Mapping[str, int], declared: Sequence[str] | None, truth: Mapping[bool, int]
) -> int | None:
    """Return the class id that a value means; None for one outside the classes."""
    meant = value
    if isinstance(value, bool):
        meant = truth.get(value)
    elif declared is not None and isinstance(value, int) and 0 <= value < len(declared):
        meant = declared[value]
    if isinstance(meant, str):
        return ids.get(meant)
    known = declared is None and isinstance(meant, int) and 0 <= meant < len(ids)
    return meant if known else None
