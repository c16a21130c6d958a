"""Text classification data: columns to token ids, labels by public names, metrics on evaluation rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_dp.errors import DataError


def label_names(dataset: Any, label_column: str, given: Sequence[str] | None) -> list[str]:
    """The class names: ``given``, else those the file's schema declares. Rows are never scanned for them.

    (A label set read off private rows would itself be a release: a class with one member tells of that member.)
    Raises: DataError when neither is there.
    """
    require_columns(dataset, [label_column], "label_column")
    if given:
        return list(given)
    declared = getattr(dataset.features[label_column], "names", None)
    if declared is None:
        raise DataError(
            f"The label column {label_column!r} declares no class names ({dataset.features[label_column]}). Name them in the "
            "configuration, in the order of their ids: class_names: [negative, positive]"
        )
    return list(declared)


def require_columns(dataset: Any, columns: Sequence[str], argument: str) -> None:
    """Raise DataError naming the columns that are missing and those that are there."""
    missing = [column for column in columns if column not in dataset.column_names]
    if missing:
        raise DataError(f"`{argument}` names {missing}, but the data has the columns {dataset.column_names}.")


def encode(
    dataset: Any, tokenizer: Any, text_columns: Sequence[str], label_column: str, names: Sequence[str], max_length: int
) -> Any:
    """Token ids, attention mask and ``label`` for each row; one or two text columns, cut at ``max_length`` tokens.

    Raises: DataError for missing columns, text that is no string, or a label outside ``0 .. len(names) - 1``.
    """
    require_columns(dataset, text_columns, "text_columns")
    require_columns(dataset, [label_column], "label_column")
    ids = {name: index for index, name in enumerate(names)}

    def rows(batch: dict[str, list[Any]]) -> dict[str, Any]:
        for column in text_columns:
            if not all(isinstance(text, str) for text in batch[column]):
                raise DataError(f"The text column {column!r} has a value that is not text. Drop or fill such rows.")
        labels = [ids.get(label, -1) if isinstance(label, str) else label for label in batch[label_column]]
        if not all(isinstance(label, int) and 0 <= label < len(names) for label in labels):
            raise DataError(
                f"The label column {label_column!r} has a value outside the classes {list(names)} (ids 0 to {len(names) - 1})."
            )
        encoded = tokenizer(*[batch[column] for column in text_columns], truncation=True, max_length=max_length)
        return {**encoded, "label": labels}

    return dataset.map(rows, batched=True, remove_columns=dataset.column_names, desc="Tokenizing")


def accuracy() -> Callable[[Any], dict[str, float]]:
    """``compute_metrics`` for Trainer: accuracy, through ``evaluate``'s metric shipped with this package."""
    import evaluate

    metric = evaluate.load(str(Path(__file__).parent / "metrics" / "accuracy"))

    def compute(prediction: Any) -> dict[str, float]:
        logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
        return metric.compute(predictions=logits.argmax(-1), references=prediction.label_ids) or {}

    return compute
