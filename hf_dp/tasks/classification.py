"""Data of classification: labels by public names, texts to token ids, metrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_dp._validate import invalid, one_of
from hf_dp.errors import DataError
from hf_dp.tasks.template_tokenizer import room_for_text


def label_names(dataset: Any, label_column: str, given: Sequence[str] | None) -> list[str]:
    """Return the class names: ``given``, else those that the schema of the file declares.

    Rows are never scanned for them. A label set read off private rows would itself be a release: a
    class with one member reveals that member. So the subfolders of a folder of images declare
    nothing.

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
            "their ids: class_names: [negative, positive]"
        )
    return list(declared)


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


def label_ids(dataset: Any, label_column: str, names: Sequence[str]) -> list[int]:
    """Return the class id of each row, for ids or names; no other column is read.

    Ids of a column that declares class names stand for these names, in whatever order they are.
    True and false stand for the classes of these names, in upper or lower case, else for the second
    and the first of two.

    Raises: DataError for a missing column, or naming the first row outside the classes;
        InvalidArgumentError for names that are other numbers than the ids of the column.
    """
    require_columns(dataset, [label_column], "label_column")
    declared = getattr(dataset.features[label_column], "names", None)
    if declared is None and "int" in str(getattr(dataset.features[label_column], "dtype", "")):
        _refuse_other_numbers(names, label_column)
    values = dataset.with_format(None)[label_column]
    ids = {name: index for index, name in enumerate(names)}
    truth = _truth_values(names)
    return [
        _label_id(row, value, label_column, ids, declared, truth)
        for row, value in enumerate(values)
    ]


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
    row: int,
    value: Any,
    column: str,
    ids: Mapping[str, int],
    declared: Sequence[str] | None,
    truth: Mapping[bool, int],
) -> int:
    """Return the class id of one row. Raises: DataError."""
    meant = value
    if isinstance(value, bool):
        meant = truth.get(value)
    elif declared is not None and isinstance(value, int) and 0 <= value < len(declared):
        meant = declared[value]
    if isinstance(meant, str) and meant in ids:
        return ids[meant]
    if declared is None and isinstance(meant, int) and 0 <= meant < len(ids):
        return meant
    called = "" if meant is value or meant is None else f", which the data calls {meant!r}"
    numbered = "" if declared else f" (ids 0 to {len(ids) - 1})"
    raise DataError(
        f"The label column {column!r} has a value outside the classes {list(ids)}{numbered}: row "
        f"{row} holds {value!r}{called}. Correct the row or leave it out, or set `class_names`"
        f"{f' to names out of {list(declared)}' if declared else ''}."
    )


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
    require_columns(dataset, text_columns, "text_columns")
    labels = label_ids(dataset, label_column, names)
    # Without the column of labels: one that is written under its own name keeps its type, so ids
    # would become text again, or those of the names that the file declares.
    kept = [keep] * (keep in dataset.column_names)
    dataset = dataset.select_columns(list(dict.fromkeys([*text_columns, *kept])))

    def encode_rows(batch: dict[str, list[Any]], rows: list[int]) -> dict[str, Any]:
        texts = [_texts(batch, column) for column in text_columns]
        encoded = tokenizer(*texts, truncation=True, max_length=max_length)
        return {**encoded, "label": [labels[row] for row in rows]}

    others = [name for name in dataset.column_names if name != keep]
    return dataset.map(
        encode_rows, batched=True, with_indices=True, remove_columns=others, desc="Tokenizing"
    )


def _texts(batch: dict[str, list[Any]], column: str) -> list[Any]:
    """Return a column of text. Raises: DataError for a value that is no string."""
    if not all(isinstance(text, str) for text in batch[column]):
        raise DataError(
            f"The text column {column!r} has a value that is not text. Drop or fill such rows."
        )
    return batch[column]


METRICS = ("accuracy", "f1")


def metrics(names: Sequence[str], classes: int) -> Callable[[Any], dict[str, float]]:
    """Return ``compute_metrics`` for Trainer, from the ``evaluate`` modules in this package.

    The modules are loaded by local path, so that nothing is downloaded.

    Raises: InvalidArgumentError for an unknown metric, or for F1 where there are not two classes.
    """
    import evaluate

    for name in names:
        one_of("metrics", name, METRICS)
    if "f1" in names and classes != 2:
        raise invalid(
            "metrics",
            list(names),
            f"to be without f1 for {classes} classes",
            "F1 here is that of class 1 of two.",
        )
    modules = [
        evaluate.load(str(Path(__file__).parent / "metrics" / f"{name}.py")) for name in names
    ]

    def compute(prediction: Any) -> dict[str, float]:
        logits = (
            prediction.predictions[0]
            if isinstance(prediction.predictions, tuple)
            else prediction.predictions
        )
        found: dict[str, float] = {}
        for module in modules:
            found |= (
                module.compute(predictions=logits.argmax(-1), references=prediction.label_ids) or {}
            )
        return found

    return compute
