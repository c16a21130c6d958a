"""Classification: which rows, texts to token ids, and metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_dp._arguments import argument
from hf_dp._validate import invalid, one_of
from hf_dp.errors import ConfigError
from hf_dp.tasks.labels import checked_names, label_ids
from hf_dp.tasks.sources import SourceArguments

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict
    from transformers import EvalPrediction, PreTrainedTokenizerBase


@dataclass
class ClassificationArguments(SourceArguments):
    """Which rows, and what their classes are called."""

    label_column: str = argument("label", "Column of class ids or class names.")
    class_names: list[str] = argument([], "Class names by id; needed when the file declares none.")
    metrics: list[str] = argument(["accuracy"], "accuracy, f1 (of class 1, for two classes).")


@dataclass
class DataArguments(ClassificationArguments):
    """Which rows of texts, and which of their columns."""

    demo_name = "hf_dp demo sentences (synthetic)"

    text_columns: list[str] = argument(["sentence"], "One or two columns of text.")
    max_length: int = argument(128, "Longest text, in tokens; longer ones are cut.")

    def demo(self) -> DatasetDict:
        """Return the demonstration sentences."""
        from hf_dp.tasks.demo_sentences import demo_dataset

        return demo_dataset()


@dataclass
class ImageArguments(ClassificationArguments):
    """Which rows of images, and which of their columns."""

    demo_name = ""

    dataset_name: str | None = argument(None, "Data set on the Hub.")
    train_file: str | None = argument(
        None,
        "Training rows: .parquet, .csv, .json or .jsonl, or a folder with a subfolder "
        "of images for each class.",
    )
    image_column: str = argument("image", "Column of images, or of paths of image files.")
    augmentation: list[str] = argument(
        [], "Random changes of training images, made anew each time: crop, flip. Default: none."
    )

    def demo(self) -> DatasetDict:
        """Raise ConfigError: there are none."""
        raise ConfigError(
            "Expected `dataset_name` to be a data set on the Hub, got 'demo': hf_dp has no images "
            "of its own. Name it, or give train_file and validation_file."
        )


def encode(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    text_columns: list[str],
    label_column: str,
    names: Sequence[str],
    max_length: int,
    keep: str | None = None,
) -> Dataset:
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
        expected = "to name one or two columns"
        raise invalid("text_columns", list(text_columns), expected, "A model reads one or a pair.")
    added = tokenizer.num_special_tokens_to_add(pair=len(text_columns) == 2)
    if max_length <= added:
        expected = f"to be above {added}, which the template and the special tokens take"
        raise invalid("max_length", max_length, expected, "Raise it, or shorten the template.")
    checked_names({"rows": dataset}, text_columns, label_column, names)
    labels = label_ids(dataset, label_column, names)
    # Without the column of labels: one that is written under its own name keeps its type, so ids
    # would become text again, or those of the names that the file declares.
    kept = [keep] * (keep in dataset.column_names)
    dataset = dataset.select_columns(list(dict.fromkeys([*text_columns, *kept])))

    def encode_rows(batch: dict[str, list[str]], rows: list[int]) -> dict[str, Any]:
        texts = [batch[column] for column in text_columns]
        encoded = tokenizer(*texts, truncation=True, max_length=max_length)
        return {**encoded, "label": [labels[row] for row in rows]}

    others = [name for name in dataset.column_names if name != keep]
    return dataset.map(
        encode_rows, batched=True, with_indices=True, remove_columns=others, desc="Tokenizing"
    )


def one_or_all(sets: dict[str, Dataset]) -> Dataset | dict[str, Dataset]:
    """Return evaluation sets as the Trainer takes them: one, or several by name."""
    return next(iter(sets.values())) if len(sets) == 1 else sets


METRICS = ("accuracy", "f1")


def metrics(names: Sequence[str], classes: int) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return ``compute_metrics`` for Trainer: the accuracy, and the F1 of class 1 of two.

    F1 is the harmonic mean of precision and recall, 0 where both are undefined.

    Raises: InvalidArgumentError for an unknown metric, or for F1 where there are not two classes.
    """
    for name in names:
        one_of("metrics", name, METRICS)
    if "f1" in names and classes != 2:
        expected = f"to be without f1 for {classes} classes"
        raise invalid("metrics", list(names), expected, "F1 here is that of class 1 of two.")

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        logits = prediction.predictions
        found = (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)
        there = np.asarray(prediction.label_ids)
        both = float(np.sum((found == 1) & (there == 1)))
        values = {
            "accuracy": float(np.mean(found == there)),
            "f1": 2 * both / max(float(np.sum(found == 1) + np.sum(there == 1)), 1.0),
        }
        return {name: values[name] for name in names}

    return compute
