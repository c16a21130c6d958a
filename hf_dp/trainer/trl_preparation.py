"""What TRL's trainers make of model, tokenizer and data before they hand them to Trainer."""

from __future__ import annotations

import copy
import reprlib
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, TypeAlias

from datasets import Dataset
from transformers import Trainer
from transformers.trainer_utils import PredictionOutput

try:
    from trl import DPOConfig as DPOConfig
    from trl import DPOTrainer, SFTTrainer, is_conversational, is_conversational_from_value
    from trl import SFTConfig as SFTConfig
except ImportError as missing:
    raise ImportError("This trainer needs TRL. Run `pip install hf-dp[trl]`.") from missing

from hf_dp.batches.structure import Row
from hf_dp.errors import DataError, HfDpError
from hf_dp.overlap import TrainingRows
from hf_dp.run.checks import check_train_dataset
from hf_dp.tasks.generation.chat import ChatEncoding
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.inherited import Refusal
from hf_dp.trainer.rows import Rows
from hf_dp.trainer.trainer import DPTrainer

_MASKED = ("input_ids", "assistant_masks")  # as TRL calls them
_PICTURES = ("image", "images")
_EMPTY = ("None", "no messages")
# To evaluate on: one, several, or by name.
DataSets: TypeAlias = "Dataset | dict[str, Dataset] | str | None"
# By which columns TRL tells conversations from texts.
_TEXTS = ("prompt", "completion", "messages", "chosen", "rejected", "conversations")


def only(*allowed: object, reason: str, move: str = "Remove it.") -> Refusal:
    """Return the refusal of all values of an argument but these."""
    expected = f"to be {' or '.join(map(repr, allowed))}"
    return Refusal(lambda value: value not in allowed, expected, reason, move)


# What SFTConfig and DPOConfig both add to TrainingArguments; it concerns the model, or each row by
# itself.
TRL_WORKS = frozenset(
    """
    model_init_kwargs trust_remote_code pad_token dataset_num_proc max_length truncation_mode
    pad_to_multiple_of
    """.split()
)
TRL_REFUSED: Mapping[str, Refusal] = MappingProxyType(
    {
        "padding_free": only(
            False,
            reason="It flattens a batch into one sequence, in which no layer's input has examples "
            "to split by.",
            move="Remove it; max_tokens_per_physical_batch keeps padding small.",
        ),
        "router_aux_loss_coef": only(
            None,
            0,
            reason="The load-balancing loss is a mean over all tokens of a batch, so an example's "
            "gradient would depend on its neighbors.",
        ),
        "activation_offloading": only(
            False,
            reason="It wraps TRL's own training step, which does not run, so it would be silently "
            "ignored.",
            move="Remove it; to save memory, set gradient_checkpointing=True.",
        ),
    }
)


class _HandedOver(Exception):
    """Ends the constructor of one of TRL's trainers where it calls Trainer's."""


class _InPlaceOfTrainer(Trainer):
    """The next class after TRL's own: it keeps what Trainer would be given, and goes no further.

    TRL prepares data in no other place than in this constructor. What follows the call would put
    another function in place of the head's forward, and count metrics over batches.
    """

    def __init__(self, **given: Any):
        vars(self).update(given)
        raise _HandedOver


class Preparation(Trainer):
    """The constructor of one of TRL's trainers, up to where it calls Trainer's. It trains nothing.

    So tokenizer, chat template, padding token, labels and truncation are TRL's own.

    Attributes: model, args, data_collator, train_dataset, eval_dataset, processing_class: prepared.

    Raises: as :func:`by_row`.
    """

    model: Any
    args: SFTConfig | DPOConfig
    processing_class: Any
    _between: tuple[Any, ...] = ()  # what _prepare_dataset takes between arguments and name

    def __init__(self, **given: Any):
        with suppress(_HandedOver):
            super().__init__(**given)

    def _prepare_dataset(self, dataset: Dataset, *others: Any) -> Dataset:
        prepare = super()._prepare_dataset  # type: ignore[misc]  # of TRL's trainer
        return by_row(dataset, lambda rows: prepare(rows, *others), others[-1])

    def of_evaluation(self, dataset: DataSets) -> DataSets:
        """Return an evaluation set, or a mapping of them, prepared as the training set was.

        None and the name of a set stay as they are.
        """

        def prepared(rows: Dataset, name: str) -> Dataset:
            tokenizer = self.processing_class
            return self._prepare_dataset(rows, tokenizer, self.args, *self._between, name)

        return each_set(dataset, prepared)


class SFTPreparation(Preparation, SFTTrainer, _InPlaceOfTrainer):
    """The preparation of SFTTrainer.

    With `assistant_only_loss`, and a chat template that neither marks what the assistant writes nor
    is known to TRL, its tokens are found by comparing each turn with the turns before it
    (:class:`~hf_dp.tasks.generation.chat.ChatEncoding`).

    Raises: DataError for a template that rewrites earlier turns.
    """

    _by_turns = False

    def __init__(self, **given: Any):
        self._between = (False, given["formatting_func"])  # nothing is packed
        try:
            super().__init__(**given)
        except ValueError as problem:
            if isinstance(problem, DataError) or not self._needs_turns(**given):
                raise
            self._by_turns, by_turns = True, copy.copy(given["args"])
            by_turns.assistant_only_loss = False
            super().__init__(**{**given, "args": by_turns})

    def _needs_turns(self, args: SFTConfig, train_dataset: Dataset, **_: object) -> bool:
        tokenizer = getattr(self, "_tokenizer", None)  # as TRL loaded it
        if not args.assistant_only_loss or "messages" not in train_dataset.column_names:
            return False
        chats = getattr(tokenizer, "chat_template", None)
        return bool(chats) and ChatEncoding(tokenizer, sys.maxsize).template is None

    def _prepare_dataset(self, dataset: Dataset, processing_class: Any, *others: Any) -> Dataset:
        if self._by_turns and "input_ids" not in dataset.column_names:
            encoding = ChatEncoding(processing_class, sys.maxsize)

            def encode(row: Row, index: int) -> dict[str, list[int]]:
                return dict(zip(_MASKED, encoding.whole(row["messages"], index), strict=True))

            dataset = dataset.map(encode, with_indices=True, remove_columns="messages")
        return super()._prepare_dataset(dataset, processing_class, *others)

    def of_evaluation(self, dataset: DataSets) -> DataSets:
        skips = (self.args.dataset_kwargs or {}).get("skip_prepare_dataset")
        return dataset if skips else super().of_evaluation(dataset)


class DPOPreparation(Preparation, DPOTrainer, _InPlaceOfTrainer):
    """The preparation of DPOTrainer: tokens of prompts and of both answers, without reference."""


class PreparedByTRL(DPTrainer):
    """DPTrainer on rows that one of TRL's trainers prepares, also in evaluation."""

    _preparation: Preparation
    _raw_rows: TrainingRows | None = None

    def _prepare_rows(
        self,
        preparation: type[Preparation],
        args: DPTrainingArguments,
        train_dataset: Dataset,
        eval_dataset: DataSets,
        **given: Any,
    ) -> tuple[Preparation, Rows]:
        """Return what TRL makes of model, tokenizer and both data sets, and the rows it was given.

        Raises: DataError for rows that cannot be prepared one by one, or that TRL would drop.
        """
        check_train_dataset(train_dataset)
        check_rows(train_dataset)
        rows = Rows.of(args, train_dataset, eval_dataset)
        of_trl = copy.copy(args)
        if args.is_private:
            if not args.evaluate_on_training_rows:
                # TRL leaves out the columns that it has tokenized.
                self._raw_rows = TrainingRows(rows.data)
                self._raw_rows.refuse(eval_dataset)
            # Whose a row is, is known by its place; draws are random anyway.
            of_trl.shuffle_dataset = False  # type: ignore[attr-defined]
        self._preparation = made = preparation(
            args=of_trl, train_dataset=rows.data, eval_dataset=eval_dataset, **given
        )
        if args.is_private:
            refuse_dropped_rows(rows.data, made.train_dataset, made.args.max_length)
        return made, rows

    def evaluate(
        self, eval_dataset: DataSets = None, *args: Any, **kwargs: Any
    ) -> dict[str, float]:
        """Evaluate, on a data set that may be tokenized or not."""
        return super().evaluate(self._prepared(eval_dataset), *args, **kwargs)

    def predict(self, test_dataset: Dataset, *args: Any, **kwargs: Any) -> PredictionOutput:
        """Predict, for a data set that may be tokenized or not."""
        return super().predict(self._prepared(test_dataset), *args, **kwargs)

    def _prepared(self, dataset: DataSets) -> DataSets:
        if self._raw_rows is not None and not isinstance(dataset, str):
            self._raw_rows.refuse(dataset)
        return self._of_evaluation(dataset)

    def _of_evaluation(self, dataset: DataSets) -> DataSets:
        return self._preparation.of_evaluation(dataset)


def by_row(dataset: Dataset, prepare: Callable[[Dataset], Dataset], name: str) -> Dataset:
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


def each_set(dataset: DataSets, prepare: Callable[[Dataset, str], Dataset]) -> DataSets:
    """Return what ``prepare(set, name)`` makes of a data set, or of each in a mapping.

    None and the name of a set stay as they are.
    """
    if dataset is None or isinstance(dataset, str):
        return dataset
    if isinstance(dataset, dict):
        return {name: prepare(each, name) for name, each in dataset.items()}
    return prepare(dataset, "eval")


def check_rows(dataset: Dataset) -> None:
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
    columns = [name for name in _TEXTS if name in dataset.column_names]
    if "input_ids" in dataset.column_names or not columns:
        return
    first = None
    for index, row in enumerate(dataset.select_columns(columns)):
        kind = _kind(row)
        first = kind if first is None else first
        if kind != first or kind in _EMPTY:
            raise DataError(
                f"Row {index} of the train_dataset has {kind} as {columns}, and the first row has "
                f"{first}, by which TRL prepares them all. Give all rows one format, or leave such "
                "a row out."
            )


def _kind(row: Row) -> str:
    if all(value is None for value in row.values()):
        return _EMPTY[0]
    try:
        if is_conversational_from_value(row):
            return "a conversation (from, value)"
        return "a conversation" if is_conversational(row) else "a text"
    except IndexError:
        return _EMPTY[1]


def refuse_dropped_rows(before: Dataset, after: Dataset, max_length: int | None) -> None:
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
