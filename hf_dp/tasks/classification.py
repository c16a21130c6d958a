"""Data of classification: labels by public names, texts to token ids, metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hf_dp._validate import invalid, one_of
from hf_dp.errors import DataError
from hf_dp.tasks.template_tokenizer import room_for_text

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
            raise invalid(
                "class_names",
                list(given),
                "to name at least two different classes",
                "In the order of their ids.",
            )
        return list(given)
    declared = getattr(dataset.features[label_column], "names", None)
    if declared is None or _subfolders(dataset, label_column):
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


def _subfolders(dataset: Any, label_column: str) -> bool:
    """Return whether the labels are the names of a folder's subfolders, which datasets numbered."""
    names = getattr(dataset.features[label_column], "names", None)
    return names is not None and dataset.info.builder_name == "imagefolder"


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
    problems, names, rows = [], None, next(iter(sets.values()))
    if label_column in rows.column_names:
        try:
            names = label_names(rows, label_column, given)
        except DataError as problem:
            problems.append(str(problem))
    for which, rows in sets.items():
        found = _row_problems(rows, text_columns, label_column, names)
        problems += [f"{which}: {problem}" for problem in found]
    if problems or names is None:
        raise DataError("\n".join(problems))
    return names


def _row_problems(
    dataset: Any, text_columns: Sequence[str], label_column: str, names: Sequence[str] | None
) -> list[str]:
    """Return all that keeps rows from being encoded: columns, texts and labels."""
    problems = []
    for argument, columns in (("text_columns", text_columns), ("label_column", [label_column])):
        try:
            require_columns(dataset, columns, argument)
        except DataError as problem:
            problems.append(str(problem))
    plain = dataset.with_format(None)
    for column in text_columns:
        if column in dataset.column_names:
            bad = [row for row, text in enumerate(plain[column]) if not isinstance(text, str)]
            problems += [_no_text(column, bad, plain)] * bool(bad)
    if names is not None and label_column in dataset.column_names:
        try:
            label_ids(dataset, label_column, names)
        except DataError as problem:
            problems.append(str(problem))
    return problems


def _no_text(column: str, bad: Sequence[int], rows: Any) -> str:
    held = _each([f"row {row} holds {rows[row][column]!r}" for row in bad[:_MOST_ROWS]], len(bad))
    return f"The text column {column!r} holds no text: {held}. Fill or leave out such rows."


def _each(said: Sequence[str], count: int) -> str:
    more = "" if count <= len(said) else f" and {count - len(said)} more"
    return ", ".join(said) + more


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
    outside = [row for row, label in enumerate(found) if label is None]
    if outside:
        called = {
            value: f", which the data calls {declared[value]!r}"
            for value in (values[row] for row in outside)
            if declared is not None and isinstance(value, int) and 0 <= value < len(declared)
        }
        held = [
            f"row {row} holds {values[row]!r}{called.get(values[row], '')}"
            for row in outside[:_MOST_ROWS]
        ]
        numbered = "" if declared else f" (ids 0 to {len(ids) - 1})"
        raise DataError(
            f"The label column {label_column!r} has a value outside the classes {list(ids)}"
            f"{numbered}: {_each(held, len(outside))}. Correct the row or leave it out, or set "
            f"`class_names`{f' to names out of {list(declared)}' if declared else ''}."
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
    if {"false", "true"} & set(words):
        return {
            value: words.index(str(value).lower())
            for value in (False, True)
            if str(value).lower() in words
        }
    return {False: 0, True: 1} if len(names) == 2 else {}


def _label_id(
    value: Any,
    ids: Mapping[str, int],
    declared: Sequence[str] | None,
    truth: Mapping[bool, int],
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


def encode(
    dataset: Any,
    tokenizer: Any,
    text_columns: Sequence[str],
    label_column: str,
    names: Sequence[str],
    max_length: int,
    keep: str | None = None,
) -> Any:
    """Return token ids, attention mask and ``label`` for each row, and the column ``keep``, where
    there is one.

    There are one or two text columns. The tokenizer decides what the text becomes: a sequence for a
    classification head, or a filled template
    (:func:`~hf_dp.tasks.template_tokenizer.with_template`). It is cut at ``max_length`` tokens. Of
    a template only the texts are cut, the longer one first.

    Raises: DataError for missing columns, text that is no string, or a label outside the classes;
        InvalidArgumentError for other than one or two text columns, or where no token of text
        would fit.
    """
    if len(text_columns) not in (1, 2):
        raise invalid(
            "text_columns",
            list(text_columns),
            "to name one or two columns",
            "A model reads a text or a pair.",
        )
    room_for_text(tokenizer, len(text_columns), max_length)
    if problems := _row_problems(dataset, text_columns, label_column, names):
        raise DataError("\n".join(problems))
    labels = label_ids(dataset, label_column, names)
    # Without the column of labels: one that is written under its own name keeps its type, so ids
    # would become text again, or those of the names that the file declares.
    kept = [keep] * (keep in dataset.column_names)
    dataset = dataset.select_columns(list(dict.fromkeys([*text_columns, *kept])))

    def encode_rows(batch: dict[str, list[Any]], rows: list[int]) -> dict[str, Any]:
        texts = [batch[column] for column in text_columns]
        encoded = tokenizer(*texts, truncation=True, max_length=max_length)
        return {**encoded, "label": [labels[row] for row in rows]}

    others = [name for name in dataset.column_names if name != keep]
    return dataset.map(
        encode_rows, batched=True, with_indices=True, remove_columns=others, desc="Tokenizing"
    )


METRICS = ("accuracy", "f1")


def metrics(names: Sequence[str], classes: int) -> Callable[[Any], dict[str, float]]:
    """Return ``compute_metrics`` for Trainer, by metrics of ``evaluate`` in this package.

    Raises: InvalidArgumentError for an unknown metric, or for F1 where there are not two classes.
    """
    from hf_dp.tasks.metrics.classes import ClassMetric

    for name in names:
        one_of("metrics", name, METRICS)
    if "f1" in names and classes != 2:
        raise invalid(
            "metrics",
            list(names),
            f"to be without f1 for {classes} classes",
            "F1 here is that of class 1 of two.",
        )
    found_by = [ClassMetric(config_name=name, keep_in_memory=True) for name in names]

    def compute(prediction: Any) -> dict[str, float]:
        logits = (
            prediction.predictions[0]
            if isinstance(prediction.predictions, tuple)
            else prediction.predictions
        )
        found: dict[str, float] = {}
        for metric in found_by:
            given = {"predictions": logits.argmax(-1), "references": prediction.label_ids}
            found |= metric.compute(**given) or {}
        return found

    return compute
