"""What TRL's trainers make of model, tokenizer and data before they hand them to Trainer."""

from __future__ import annotations

import copy
import reprlib
import sys
from collections.abc import Callable
from typing import Any

from datasets import Dataset
from transformers import Trainer
from trl import DPOTrainer, SFTTrainer
from trl.data_utils import is_conversational, is_conversational_from_value

from hf_dp.errors import DataError, HfDpError
from hf_dp.tasks.generation.chat import ChatEncoding

_MASKED = ("input_ids", "assistant_masks")  # as TRL calls them
_PICTURES = ("image", "images")
# By which columns TRL tells conversations from texts.
_TEXTS = ("prompt", "completion", "messages", "chosen", "rejected", "conversations")


class _HandedOver(Exception):
    """Ends the constructor of one of TRL's trainers. Args: given: what Trainer would be given."""

    def __init__(self, given: dict[str, Any]):
        super().__init__("to DPTrainer")
        self.given = given


class _InPlaceOfTrainer(Trainer):
    """The next class after TRL's own: its constructor gets what Trainer's would."""

    def __init__(self, *args: Any, **given: Any):
        raise _HandedOver(given)


class SFTPreparation(SFTTrainer, _InPlaceOfTrainer):
    """SFTTrainer's constructor, up to where it calls Trainer's. It trains nothing.

    So tokenizer, chat template, padding token, labels and truncation are TRL's own, and nothing of
    what follows happens: no fused head, no metrics of batches.

    With `assistant_only_loss`, and a chat template that neither marks what the assistant writes nor
    is known to TRL, its tokens are found by comparing each turn with the turns before it
    (:class:`~hf_dp.tasks.generation.chat.ChatEncoding`).

    Args: those of SFTTrainer.

    Attributes:
        given: model, data_collator, train_dataset, eval_dataset and processing_class, prepared.

    Raises: DataError for a template that rewrites earlier turns, and as :func:`by_row`.
    """

    _by_turns = False

    def __init__(self, **given: Any):
        args, rows = given["args"], given["train_dataset"]
        try:
            super().__init__(**given)
        except _HandedOver as handed:
            self.given = handed.given
        except DataError:  # a ValueError, too
            raise
        except ValueError as problem:
            unknown = "template" in str(problem) and "messages" in rows.column_names
            if self._by_turns or not (args.assistant_only_loss and unknown):
                raise
            self._by_turns, by_turns = True, copy.copy(args)
            by_turns.assistant_only_loss = False
            self.__init__(**{**given, "args": by_turns})  # type: ignore[misc]

    def _prepare_dataset(self, dataset: Any, processing_class: Any, *others: Any) -> Any:
        if self._by_turns and "input_ids" not in dataset.column_names:
            encoding = ChatEncoding(processing_class, sys.maxsize)

            def encode(row: Any, index: int) -> dict[str, Any]:
                return dict(zip(_MASKED, encoding.whole(row["messages"], index), strict=True))

            dataset = dataset.map(encode, with_indices=True, remove_columns="messages")
        prepare = super()._prepare_dataset
        return by_row(dataset, lambda rows: prepare(rows, processing_class, *others), others[-1])

    def of_evaluation(self, dataset: Any) -> Any:
        """Return an evaluation set, or a mapping of them, prepared as the training set was.

        None and the name of a set stay as they are.
        """
        if self._skip_prepare_dataset:
            return dataset
        return each_set(dataset, self._prepared)

    def _prepared(self, dataset: Any, name: str) -> Any:
        args, tokenizer = self.given["args"], self.given["processing_class"]
        return self._prepare_dataset(dataset, tokenizer, args, False, self._formatting_func, name)


class DPOPreparation(DPOTrainer, _InPlaceOfTrainer):
    """The same for DPOTrainer: tokens of prompts and of both answers, without reference model."""

    def __init__(self, **given: Any):
        try:
            super().__init__(**given)
        except _HandedOver as handed:
            self.given = handed.given

    def _prepare_dataset(self, dataset: Any, *others: Any) -> Any:
        prepare = super()._prepare_dataset
        return by_row(dataset, lambda rows: prepare(rows, *others), others[-1])

    def of_evaluation(self, dataset: Any) -> Any:
        """Return an evaluation set as :meth:`SFTPreparation.of_evaluation`."""
        return each_set(dataset, self._prepared)

    def _prepared(self, dataset: Any, name: str) -> Any:
        args, tokenizer = self.given["args"], self.given["processing_class"]
        return self._prepare_dataset(dataset, tokenizer, args, name)


def by_row(dataset: Any, prepare: Callable[[Any], Any], name: str) -> Any:
    """Return ``prepare(dataset)``, and where TRL fails, find the first row that it fails on.

    Raises: DataError names that row.
    """
    try:
        return prepare(dataset)
    except (HfDpError, OSError, MemoryError):
        raise
    except Exception as failure:
        problem, first, end = failure, 0, len(dataset)
    while end - first > 1:
        middle = (first + end) // 2
        try:
            prepare(dataset.select(range(first, middle)))
            first = middle
        except Exception as failure:
            problem, end = failure, middle
    raise DataError(
        f"TRL cannot prepare row {first} of the {name} set, {reprlib.repr(dataset[first])} "
        f"({type(problem).__name__}: {problem}). Expected a text in the column that "
        "dataset_text_field names, a prompt with a completion, messages with a role and a content "
        "each (one of the assistant's, with assistant_only_loss), or, for DPO, chosen and rejected "
        "answers; none of them None. Correct or leave out such rows, or rename the columns."
    ) from problem


def each_set(dataset: Any, prepare: Callable[[Any, str], Any]) -> Any:
    """Return what ``prepare(set, name)`` makes of a data set, or of each in a mapping.

    None and the name of a set stay as they are.
    """
    if dataset is None or isinstance(dataset, str):
        return dataset
    if isinstance(dataset, dict):
        return {name: prepare(each, name) for name, each in dataset.items()}
    return prepare(dataset, "eval")


def check_rows(dataset: Any) -> None:
    """Check that TRL prepares each row for itself.

    It decides by the first row whether all are conversations, so all must be of one kind.

    Raises: DataError for another kind of data set, for images, and for a row unlike the first.
    """
    if not isinstance(dataset, Dataset):
        raise DataError(
            f"Expected `train_dataset` to be a datasets.Dataset, got {type(dataset).__name__}. "
            "Make one with Dataset.from_list(rows); load without streaming=True."
        )
    pictures = sorted(set(_PICTURES) & set(dataset.column_names))
    if pictures:
        raise DataError(
            f"The train_dataset has the column {pictures[0]!r}, and only texts are "
            "prepared here. Remove the column, or train with DPTrainer and a collator of your own."
        )
    kinds = [name for name in _TEXTS if name in dataset.column_names]
    if "input_ids" in dataset.column_names or not kinds:
        return
    first = None
    for index, row in enumerate(dataset.select_columns(kinds)):
        if all(value is None for value in row.values()):
            raise DataError(
                f"Row {index} of the train_dataset has None as {kinds}. Fill it in, or leave it "
                "out."
            )
        try:
            kind = (is_conversational(row), is_conversational_from_value(row))
        except IndexError:
            raise DataError(
                f"Row {index} of the train_dataset has no messages. Leave it out."
            ) from None
        first = kind if first is None else first
        if kind != first:
            raise DataError(
                f"Row {index} of the train_dataset is of another kind than the first (a text and a "
                "conversation), by which TRL prepares them all. Give all rows one format."
            )


def refuse_dropped_rows(before: Any, after: Any, max_length: int | None) -> None:
    """Raise DataError when rows were dropped: their number is public, and must not depend on what
    is in them."""
    dropped = len(before) - len(after)
    if dropped:
        raise DataError(
            f"{dropped} of the {len(before)} rows have no token to predict within max_length="
            f"{max_length}. TRL drops such rows, but how many rows there are is public in the "
            "privacy statement and must not depend on their texts. Raise max_length (None: no "
            "limit), or leave such rows out by a rule that you may tell everyone."
        )
