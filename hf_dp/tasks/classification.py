"""Text classification data: columns to token ids, labels by public names, metrics on evaluation
rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_dp._validate import invalid, one_of
from hf_dp.errors import DataError
from hf_dp.tasks.template_tokenizer import room_for_text


def label_names(dataset: Any, label_column: str, given: Sequence[str] | None) -> list[str]:
    """The class names: ``given``, else those the file's schema declares. Rows are never scanned for
    them.

    (A label set read off private rows would itself be a release: a class with one member tells of
    that member.)
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
    if declared is None:
        raise DataError(
            f"The label column {label_column!r} declares no class names "
            f"({dataset.features[label_column]}). Name them in the configuration, in the order of "
            "their ids: class_names: [negative, positive]"
        )
    return list(declared)


def require_columns(dataset: Any, columns: Sequence[str], argument: str) -> None:
    """Raise DataError naming the columns that are missing and those that are there."""
    missing = [column for column in columns if column not in dataset.column_names]
    if missing:
        raise DataError(
            f"`{argument}` names {missing}, but the data has the columns {dataset.column_names}."
        )


def encode(
    dataset: Any,
    tokenizer: Any,
    text_columns: Sequence[str],
    label_column: str,
    names: Sequence[str],
    max_length: int,
) -> Any:
    """Token ids, attention mask and ``label`` for each row; one or two text columns, cut at
    ``max_length`` tokens.

    The tokenizer decides what the text becomes: a sequence for a classification head, or a filled
    template (:func:`~hf_dp.tasks.template_tokenizer.with_template`), of which only the texts are
    cut, the longer one first.

    Raises: DataError for missing columns, text that is no string, or a label outside ``0 ..
        len(names) - 1``; InvalidArgumentError for other than one or two text columns, or where no
        token of text would fit.
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
    require_columns(dataset, [label_column], "label_column")
    ids = {name: index for index, name in enumerate(names)}

    def rows(batch: dict[str, list[Any]]) -> dict[str, Any]:
        for column in text_columns:
            if not all(isinstance(text, str) for text in batch[column]):
                raise DataError(
                    f"The text column {column!r} has a value that is not text. Drop or fill such "
                    "rows."
                )
        labels = [
            ids.get(label, -1) if isinstance(label, str) else label for label in batch[label_column]
        ]
        if not all(isinstance(label, int) and 0 <= label < len(names) for label in labels):
            raise DataError(
                f"The label column {label_column!r} has a value outside the classes {list(names)} "
                f"(ids 0 to {len(names) - 1})."
            )
        encoded = tokenizer(
            *[batch[column] for column in text_columns], truncation=True, max_length=max_length
        )
        return {**encoded, "label": labels}

    return dataset.map(rows, batched=True, remove_columns=dataset.column_names, desc="Tokenizing")


METRICS = ("accuracy", "f1")


def metrics(names: Sequence[str], classes: int) -> Callable[[Any], dict[str, float]]:
    """``compute_metrics`` for Trainer, through ``evaluate``'s modules of these names shipped with
    this package.

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
