"""Classification: which rows, what their classes are called and which each is, texts to token ids,
and metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_dp._arguments import argument
from hf_dp._validate import invalid, one_of
from hf_dp.errors import ConfigError, DataError
from hf_dp.tasks.sources import SourceArguments, require_columns

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

    train_file: str | None = argument(
        None,
        "Training rows: .parquet, .csv, .json or .jsonl, or a folder that `hf-dp shard` "
        "made, with the same sampling, and look_over when_drawn.",
    )
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
    """Return token ids, attention mask and ``label`` for each row, and the column ``keep``.

    The tokenizer makes a sequence of one or two texts, or a filled template
    (:func:`~hf_dp.tasks.templates.with_template`), of which only the texts are cut, the longer one
    first.

    Raises: DataError, naming the rows: also for a row without tokens, which no model reads.
    """
    check_reading(tokenizer, text_columns, max_length)
    checked_names({"rows": dataset}, text_columns, label_column, names)
    labels = label_ids(dataset, label_column, names)
    # Without the column of labels: one that is written under its own name keeps its type, so ids
    # would become text again, or those of the names that the file declares.
    kept = [keep] * (keep in dataset.column_names)
    dataset = dataset.select_columns(list(dict.fromkeys([*text_columns, *kept])))

    def encode_rows(batch: dict[str, list[str]], rows: list[int]) -> dict[str, object]:
        texts = [batch[column] for column in text_columns]
        encoded = tokenizer(*texts, truncation=True, max_length=max_length)
        return {**encoded, "label": [labels[row] for row in rows]}

    others = [name for name in dataset.column_names if name != keep]
    made = dataset.map(
        encode_rows, batched=True, with_indices=True, remove_columns=others, desc="Tokenizing"
    )
    empty = [row for row, tokens in enumerate(made.with_format(None)["input_ids"]) if not tokens]
    if empty:
        more = f" and {len(empty) - _MOST_ROWS} more" if len(empty) > _MOST_ROWS else ""
        listed = ", ".join(map(str, empty[:_MOST_ROWS]))
        raise DataError(f"Rows without tokens: {listed}{more}. Leave them out.")
    return made


def check_reading(
    tokenizer: PreTrainedTokenizerBase, text_columns: Sequence[str], max_length: int
) -> None:
    """Raise InvalidArgumentError for columns, or a length, that cannot be read."""
    if len(text_columns) not in (1, 2):
        expected = "to name one or two columns"
        raise invalid("text_columns", list(text_columns), expected, "A model reads one or a pair.")
    added = tokenizer.num_special_tokens_to_add(pair=len(text_columns) == 2)
    if max_length <= added:
        expected = f"to be above {added}, which the template and the special tokens take"
        raise invalid("max_length", max_length, expected, "Raise it, or shorten the template.")


@dataclass
class EncodeWhenDrawn:
    """Makes a batch of rows of texts, each encoded as :func:`encode` does, when it is drawn.

    Args: declared: the class names of ids, where the rows declare any. pad: pads encoded rows.
    """

    tokenizer: PreTrainedTokenizerBase
    data: DataArguments
    names: Sequence[str]
    declared: Sequence[str] | None
    pad: Callable[[list[dict[str, object]]], dict[str, Any]]

    def __post_init__(self) -> None:
        check_reading(self.tokenizer, self.data.text_columns, self.data.max_length)
        self._meanings = _meanings(self.names, self.declared)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch, also of rows that are encoded and have no texts, as those of evaluation
        sets. Raises: DataError, KeyError for a row whose texts are no texts, or of no class."""
        texts = set(self.data.text_columns)
        return self.pad([self._encoded(row) if texts & row.keys() else dict(row) for row in rows])

    def _encoded(self, row: Mapping[str, Any]) -> dict[str, object]:
        texts = [row[column] for column in self.data.text_columns]
        if not all(isinstance(text, str) for text in texts):
            raise DataError("A row holds no text.")
        found = self.tokenizer(*texts, truncation=True, max_length=self.data.max_length)
        label = row[self.data.label_column]
        return {**found, "label": self._meanings[type(label), label]}


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


def word_lines(prediction: EvalPrediction, names: Sequence[str]) -> list[str]:
    """Return how the untrained words of the classes are calibrated: how often each is the most
    probable and its mean probability, beside how many rows have its class."""
    logits = np.asarray(prediction.predictions, np.float64)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    means = (weights / weights.sum(-1, keepdims=True)).mean(0)
    chosen, there = logits.argmax(-1), np.asarray(prediction.label_ids)
    return [
        f"class {name}: of the {len(names)} words, its own is the likeliest in "
        f"{np.mean(chosen == index):.1%} of the rows, with a mean probability of "
        f"{means[index]:.3f} among them; {np.mean(there == index):.1%} have it"
        for index, name in enumerate(names)
    ]


_MOST_ROWS, _MOST_NAMES = 10, 200  # that a message lists


def label_names(dataset: Dataset, label_column: str, given: Sequence[str] | None) -> list[str]:
    """Return the class names: ``given``, else those that the schema of the file declares.

    They are never taken from the rows. A label set read off private rows would itself be a release:
    a class with one member reveals that member. So the subfolders of a folder of images declare
    nothing. The error shows what the rows hold, for the user to decide.
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
        f"class_names: {json.dumps(sorted(words, key=int) if whole else words)} (those are the "
        "values in the rows: check that naming them reveals nobody, and check their order)"
    )


def labels_of(names: Sequence[str]) -> dict[str, object]:
    """Return what a configuration says of the classes."""
    return {
        "num_labels": len(names),
        "id2label": dict(enumerate(names)),
        "label2id": {name: index for index, name in enumerate(names)},
    }


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
    The DataError lists what is wrong in all sets."""
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

    Raises:
        DataError: the column is missing, or a row is outside the classes; the message names it.
        InvalidArgumentError: names are other numbers than the ids of the column.
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
