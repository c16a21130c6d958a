"""What TRL's trainers make of model, tokenizer and data before they hand them to Trainer."""

from __future__ import annotations

import copy
import reprlib
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from datasets import Dataset
from peft import PeftConfig
from torch import Tensor, nn
from transformers import EvalPrediction, PreTrainedTokenizerBase, Trainer
from transformers.trainer_utils import PredictionOutput

try:
    from trl import DPOConfig as DPOConfig
    from trl import (
        DPOTrainer,
        GRPOTrainer,
        RewardTrainer,
        SFTTrainer,
        is_conversational,
        is_conversational_from_value,
    )
    from trl import GRPOConfig as GRPOConfig
    from trl import RewardConfig as RewardConfig
    from trl import SFTConfig as SFTConfig
except ImportError as missing:
    raise ImportError("This trainer needs TRL. Run `pip install hf-dp[trl]`.") from missing

from hf_dp._validate import invalid
from hf_dp.batches.structure import Batch, Row
from hf_dp.errors import DataError, HfDpError, UnsupportedArgumentError
from hf_dp.losses import IGNORED_LABEL
from hf_dp.overlap import TrainingRows
from hf_dp.run.checks import check_train_dataset
from hf_dp.run.synthetic import synthetic_examples
from hf_dp.tasks.generation.encoding import ChatEncoding
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.given import Rows
from hf_dp.trainer.inherited import Refusal, only
from hf_dp.trainer.trainer import DPTrainer

# To evaluate on: one, several, or by name.
DataSets: TypeAlias = "Dataset | dict[str, Dataset] | str | None"
# By which columns TRL tells conversations from texts.
_TEXTS = ("prompt", "completion", "messages", "chosen", "rejected", "conversations")
_EMPTY = ("None", "no messages")

# What TRL's configurations all add to TrainingArguments; it concerns the model, or each row by
# itself.
TRL_WORKS = frozenset(
    """model_init_kwargs trust_remote_code pad_token dataset_num_proc max_length
    pad_to_multiple_of""".split()
)
TEMPLATE = Refusal(
    lambda path: path is None or str(path).endswith((".jinja", ".j2")),
    "to be a Jinja file",
    "A tokenizer may bring new tokens, whose embeddings an adapter would not train. Save its "
    "chat_template to a .jinja file.",
)
TRL_REFUSED: Mapping[str, Refusal] = {
    "activation_offloading": only(
        "It acts in TRL's own step, which does not run. Set gradient_checkpointing=True.", False
    )
}
# Those of trainers of language models, too.
LM_WORKS = TRL_WORKS | {"truncation_mode"}
LM_REFUSED: Mapping[str, Refusal] = {
    **TRL_REFUSED,
    "padding_free": only("It flattens a batch, so no layer sees examples. Remove it.", False),
    "router_aux_loss_coef": only(
        "It is a mean over all tokens of a batch, so neighbors share a loss. Use router_balance.",
        None,
        0,
    ),
}


class _HandedOver(Exception):
    """Ends the constructor of one of TRL's trainers where it calls Trainer's."""


class _InPlaceOfTrainer(Trainer):
    """The next class after TRL's own: it keeps what Trainer would be given, and goes no further.
    What follows the call would replace the head's forward, and count metrics over batches."""

    def __init__(self, **given: object):
        vars(self).update(given)
        raise _HandedOver


class Preparation(Trainer):
    """The constructor of one of TRL's trainers, up to where it calls Trainer's: tokenizer, chat
    template, padding token, labels and truncation are TRL's own. It trains nothing."""

    model: Any
    data_collator: Any
    args: SFTConfig | DPOConfig | RewardConfig | GRPOConfig
    dropped = "have no token to predict within"  # the rows that TRL leaves out
    processing_class: PreTrainedTokenizerBase
    _between: tuple[object, ...] = ()  # what _prepare_dataset takes between arguments and name

    def __init__(self, **given: object):
        with suppress(_HandedOver):
            super().__init__(**given)  # type: ignore[arg-type]

    def _prepare_dataset(self, dataset: Dataset, *others: Any) -> Dataset:
        prepare = super()._prepare_dataset  # type: ignore[misc]  # of TRL's trainer
        return by_row(dataset, lambda rows: prepare(rows, *others), others[-1])

    def prepared(self, rows: Dataset, name: str) -> Dataset:
        """Return an evaluation set, prepared as the training set was."""
        return self._prepare_dataset(rows, self.processing_class, self.args, *self._between, name)


class SFTPreparation(Preparation, SFTTrainer, _InPlaceOfTrainer):
    """The preparation of SFTTrainer. With `assistant_only_loss`, and a chat template that neither
    marks what the assistant writes nor is known to TRL, its tokens are found by comparing each turn
    with the turns before it."""

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
        tokenizer: PreTrainedTokenizerBase | None
        tokenizer = getattr(self, "_tokenizer", None)  # as TRL loaded it
        if not args.assistant_only_loss or "messages" not in train_dataset.column_names:
            return False
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            return False
        return ChatEncoding(tokenizer, sys.maxsize).template is None

    def _prepare_dataset(
        self, dataset: Dataset, processing_class: PreTrainedTokenizerBase, *others: Any
    ) -> Dataset:
        if self._by_turns and "input_ids" not in dataset.column_names:
            encoding = ChatEncoding(processing_class, sys.maxsize)

            def encode(row: Row, index: int) -> dict[str, list[int]]:
                ids, mask = encoding.masked(row["messages"], index)
                return {"input_ids": ids, "assistant_masks": mask}

            dataset = dataset.map(encode, with_indices=True, remove_columns="messages")
        return super()._prepare_dataset(dataset, processing_class, *others)

    def prepared(self, rows: Dataset, name: str) -> Dataset:
        skips = (self.args.dataset_kwargs or {}).get("skip_prepare_dataset")
        return rows if skips else super().prepared(rows, name)


class DPOPreparation(Preparation, DPOTrainer, _InPlaceOfTrainer):
    """The preparation of DPOTrainer: tokens of prompts and of both answers, without reference."""


class RewardPreparation(Preparation, RewardTrainer, _InPlaceOfTrainer):
    """The preparation of RewardTrainer: tokens of both texts, each with its prompt."""

    dropped = "have a text that is longer than"


class GRPOPreparation(Preparation, GRPOTrainer, _InPlaceOfTrainer):
    """The preparation of GRPOTrainer: model, tokenizer and end tokens; rows stay as they are, and
    so does an adapter, beside which TRL would put another one as the reference."""

    eos_token_ids: list[int]

    def __init__(self, args: GRPOConfig, **given: Any):
        without_reference = copy.copy(args)
        without_reference.beta = 0.0
        super().__init__(args=without_reference, **given)


class PreparedByTRL(DPTrainer):
    """DPTrainer on rows that one of TRL's trainers prepares, also in evaluation. ``of_trl`` are
    keywords of that trainer."""

    preparation: ClassVar[type[Preparation]]
    _preparation: Preparation
    _raw_rows: TrainingRows | None = None

    def __init__(
        self,
        args: DPTrainingArguments | None,
        train_dataset: Dataset | None,
        eval_dataset: DataSets,
        of_trl: Mapping[str, object],
        peft_config: PeftConfig | None,
        **others: Any,
    ):
        checked, model = self.arguments_class.own_copy(args), of_trl["model"]
        if not isinstance(model, str):
            self._check_model(model)
        check_train_dataset(train_dataset)
        check_rows(train_dataset)
        rows = Rows.of(checked, train_dataset, eval_dataset)
        theirs = copy.copy(checked)
        if checked.is_private:
            if not checked.evaluate_on_training_rows:
                # TRL leaves out the columns that it has tokenized.
                self._raw_rows = TrainingRows(rows.data)
                self._raw_rows.refuse(eval_dataset)
            # Whose a row is, is known by its place; draws are random anyway.
            vars(theirs).update(shuffle_dataset=False)
        self._preparation = made = self.preparation(
            args=theirs, train_dataset=rows.data, eval_dataset=eval_dataset, **of_trl
        )
        if checked.is_private:
            refuse_dropped_rows(rows.data, made)
        self._complete(made, checked)
        super().__init__(
            model=made.model,
            args=checked,
            data_collator=made.data_collator,
            train_dataset=replace(rows, data=made.train_dataset),
            eval_dataset=made.eval_dataset,
            processing_class=made.processing_class,
            peft_config=peft_config,
            **others,
        )

    def _check_model(self, model: object) -> None:
        """Raise InvalidArgumentError for a model that this trainer cannot train."""
        if getattr(model, "generation_config", None) is None:
            expected, move = "to be a model that generates", "Load it by AutoModelForCausalLM."
            raise invalid("model", type(model).__name__, expected, move)

    def _complete(self, made: Preparation, args: DPTrainingArguments) -> None:
        """Add to what TRL prepared."""

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
        return each_set(dataset, self._prepare)

    def _prepare(self, rows: Dataset, name: str) -> Dataset:
        return self._preparation.prepared(rows, name)


@dataclass
class PairCollator:
    """Make a batch of b pairs: chosen texts, and rejected ones beside them.

    Each column has one row for each pair, (b, T) or (b,), so a pair is one example. Both texts of
    a pair are padded to one length. TRL's ``collate`` puts all rejected texts after all chosen
    ones.
    """

    collate: Callable[[list[Row]], dict[str, Tensor]]

    def __call__(self, rows: list[Row]) -> dict[str, Tensor]:
        """Return the batch of these rows."""
        both = self.collate(rows)
        mask = both.pop("completion_mask", None)
        if mask is not None:
            both["labels"] = both["input_ids"].masked_fill(mask == 0, IGNORED_LABEL)
        texts = {name: both.pop(name) for name in list(both) if both[name].dim() == 2}
        batch = {name: value[: len(rows)] for name, value in texts.items()}
        batch |= {f"rejected_{name}": value[len(rows) :] for name, value in texts.items()}
        return batch | both


class TrainedOnPairs(PreparedByTRL):
    """PreparedByTRL where one example is a pair of a chosen and a rejected text: the model runs on
    both before one backward, so both gradients are clipped together."""

    data_collator: PairCollator

    def _complete(self, made: Preparation, args: Any) -> None:
        if args.disable_dropout:
            disable_dropout(made.model)
        made.data_collator = PairCollator(made.data_collator)
        padding = {"rejected_input_ids": made.processing_class.pad_token_id}
        args.padding_values = padding | args.padding_values

    @abstractmethod
    def scored(self, model: nn.Module, inputs: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss of each pair, (b,), and what is predicted and what is right of it, (b,)
        or (b, 2), each from that pair alone."""

    def compute_per_example_loss(self, model: nn.Module, inputs: Batch) -> Tensor:
        """Return the loss of each pair, (b,)."""
        return self.scored(model, inputs)[0]

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Batch,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return (mean loss, what is predicted, what is right) of a batch of pairs."""
        with torch.no_grad(), self.compute_loss_context_manager():
            losses, predicted, right = self.scored(model, self._prepare_inputs(inputs))
        return (losses.mean(), *((None, None) if prediction_loss_only else (predicted, right)))

    def made_up_pairs(self) -> list[tuple[list[int], list[int]]]:
        """Return synthetic texts in twos of other lengths, as token ids."""
        made = [example["input_ids"][0].tolist() for example in synthetic_examples(self.model)]
        return list(zip(made, made[1:] + made[:1], strict=True))


def report_metrics(
    metrics: Callable[[EvalPrediction], dict[str, float]], others: dict[str, Any], args: object
) -> None:
    """Let an evaluation report these metrics, of all its rows, where keywords have no others.

    Raises: UnsupportedArgumentError for metrics that would be computed batch by batch.
    """
    if "compute_metrics" not in others and getattr(args, "batch_eval_metrics", False):
        expected = "to be False without `compute_metrics`"
        why = "What is reported by default needs all rows. Remove it, or pass compute_metrics."
        raise invalid("batch_eval_metrics", True, expected, why, UnsupportedArgumentError)
    others.setdefault("compute_metrics", metrics)


def predictions_of(prediction: EvalPrediction) -> np.ndarray:
    """Return the predictions of all rows, which may come in batches (eval_do_concat_batches)."""
    found: Any = prediction.predictions
    return np.concatenate(found) if isinstance(found, list) else np.asarray(found)


def disable_dropout(model: nn.Module) -> None:
    """Let no dropout module of a model drop anything, for good."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def by_row(dataset: Dataset, prepare: Callable[[Dataset], Dataset], name: str) -> Dataset:
    """Return ``prepare(dataset)``; where TRL fails, a DataError names the first such row."""
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
        f"({type(problem).__name__}: {problem}). Correct or leave out such rows, or rename the "
        "columns: no text, prompt, answer, role or content may be None."
    ) from problem


def each_set(dataset: DataSets, prepare: Callable[[Dataset, str], Dataset]) -> DataSets:
    """Return what ``prepare(set, name)`` makes of one data set, or of each of several by name."""
    if dataset is None or isinstance(dataset, str):
        return dataset
    if isinstance(dataset, dict):
        return {name: prepare(each, name) for name, each in dataset.items()}
    return prepare(dataset, "eval")


def check_rows(dataset: object) -> None:
    """Raise DataError for rows that TRL would not prepare each for itself: it decides by the first
    row whether all are conversations."""
    if not isinstance(dataset, Dataset):
        raise DataError(
            f"Expected `train_dataset` to be a datasets.Dataset, got {type(dataset).__name__}. "
            "Make one with Dataset.from_list(rows); load without streaming=True."
        )
    if pictures := {"image", "images"} & set(dataset.column_names):
        raise DataError(
            f"The train_dataset has the column {pictures.pop()!r}, and only texts are prepared "
            "here. Remove the column, or train with DPTrainer and a collator of your own."
        )
    columns = [name for name in _TEXTS if name in dataset.column_names]
    if "input_ids" in dataset.column_names or not columns:
        return
    first = None
    for index, row in enumerate(dataset.select_columns(columns)):
        kind = _kind(row)
        first = first or kind
        if kind != first or kind in _EMPTY:
            raise DataError(
                f"Row {index} of the train_dataset has {kind} as {columns}, but the first row has "
                f"{first}, and TRL prepares all rows like the first. Give all rows one format, or "
                "leave such a row out."
            )


def _kind(row: Row) -> str:
    """Return the kind of a row by what it holds itself: a field of any row's is None in others."""
    held = {name: value for name, value in row.items() if value is not None}
    if not held:
        return _EMPTY[0]
    for name, value in held.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            held[name] = [{key: said for key, said in value[0].items() if said is not None}]
    try:
        if is_conversational_from_value(held):
            return "a conversation (from, value)"
        return "a conversation" if is_conversational(held) else "a text"
    except IndexError:
        return _EMPTY[1]


def refuse_dropped_rows(before: Dataset, made: Preparation) -> None:
    """Raise DataError where rows were dropped by what is in them: their number is public."""
    after: Any = made.train_dataset
    if dropped := len(before) - len(after):
        raise DataError(
            f"{dropped} of the {len(before)} rows {made.dropped} "
            f"max_length={made.args.max_length}, and TRL would drop them. Raise it, or leave rows "
            "out by a rule that you may make public, since the number of rows is public."
        )
