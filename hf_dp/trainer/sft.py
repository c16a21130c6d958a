"""``DPSFTTrainer``: private supervised fine-tuning on data that TRL's SFTTrainer prepares.

Needs TRL: ``pip install hf-dp[trl]``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

from transformers import TrainingArguments

try:
    from trl import SFTConfig
except ImportError as missing:
    raise ImportError("hf_dp.trainer.sft needs TRL. Run `pip install hf-dp[trl]`.") from missing

from hf_dp._arguments import Problems
from hf_dp._validate import invalid
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.overlap import TrainingRows
from hf_dp.run.checks import check_train_dataset
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.from_arguments import own_copy
from hf_dp.trainer.inherited import Refusal
from hf_dp.trainer.rows import Rows
from hf_dp.trainer.trainer import DPTrainer
from hf_dp.trainer.trl_preparation import SFTPreparation, check_rows, refuse_dropped_rows

# They concern the model, or each row by itself; the order of rows changes no draw, and
# `packing_strategy` is read only with `packing`.
SFT_WORKS = frozenset(
    """
    model_init_kwargs trust_remote_code chat_template_path eos_token pad_token
    dataset_text_field dataset_kwargs dataset_num_proc max_length truncation_mode
    pad_to_multiple_of completion_only_loss assistant_only_loss packing_strategy shuffle_dataset
    """.split()
)
_PACKING = Refusal(
    bool,
    "to be False",
    "It joins several rows in one sequence, so no single row could be clipped.",
    "Remove it. If you pack texts beforehand, a packed row is what is protected "
    "(rows_are_chunks=True).",
)
SFT_REFUSED: Mapping[str, Refusal] = MappingProxyType(
    {
        "packing": _PACKING,
        "eval_packing": _PACKING,
        "padding_free": Refusal(
            bool,
            "to be False",
            "It flattens a batch into one sequence, in which no layer's input has examples to "
            "split by.",
            "Remove it; max_tokens_per_physical_batch keeps padding small.",
        ),
        "loss_type": Refusal(
            lambda value: value not in ("nll", "chunked_nll"),
            'to be "nll"',
            "Each example's loss is the mean negative log-likelihood of its own labeled tokens; "
            "TRL's other losses divide by the tokens of the whole batch.",
            "Remove it, or override compute_per_example_loss.",
        ),
        "router_aux_loss_coef": Refusal(
            bool,
            "to be None or 0",
            "The load-balancing loss is a mean over all tokens of a batch, so an example's "
            "gradient would depend on its neighbors.",
        ),
        "activation_offloading": Refusal(
            bool,
            "to be False",
            "It wraps TRL's own training step, which does not run, so it would be silently "
            "ignored.",
            "Remove it; to save memory, set gradient_checkpointing=True.",
        ),
    }
)


@dataclass
class DPSFTConfig(DPTrainingArguments, SFTConfig):  # type: ignore[misc]  # learning_rate: float
    r"""
    Configuration of [`DPSFTTrainer`]: the arguments of [`DPTrainingArguments`] and of
    [`~trl.SFTConfig`].

    Whatever [`~transformers.TrainingArguments`] has, too, has the defaults of
    [`DPTrainingArguments`] and not TRL's: full precision, no gradient checkpointing, a learning
    rate of 5e-5, ten logs a run. What joins rows or divides by a batch's tokens is refused,
    without privacy, too: packing, padding-free batches, other losses than `"nll"`.

    Raises:
        UnsupportedArgumentError, InvalidArgumentError: as [`DPTrainingArguments`].
    """

    _VALID_DICT_FIELDS = list(
        dict.fromkeys([*DPTrainingArguments._VALID_DICT_FIELDS, *SFTConfig._VALID_DICT_FIELDS])
    )
    _INHERITED: ClassVar[type[TrainingArguments]] = SFTConfig
    _WORK: ClassVar[frozenset[str]] = SFT_WORKS
    _REFUSED: ClassVar[Mapping[str, Refusal]] = SFT_REFUSED

    def _setting_problems(self) -> Problems:
        found = super()._setting_problems()
        for name, refusal in SFT_REFUSED.items():
            problem = refusal.problem(name, getattr(self, name), "with DPSFTTrainer")
            if problem is not None:
                found[name] = problem
        options = self.gradient_checkpointing_kwargs
        if isinstance(options, dict) and options.get("selective"):
            found.unsupported(
                "gradient_checkpointing_kwargs",
                "to have no 'selective'",
                "TRL would choose what is recomputed, outside the clipping engine. Remove it.",
            )
        return found


class DPSFTTrainer(DPTrainer):
    """Fine-tune privately on texts, prompts with completions, or conversations: DPTrainer on what
    :class:`trl.SFTTrainer` prepares.

    Tokenizing, chat templates, end tokens, labels and truncation are TRL's own functions, and treat
    each row by itself. An example's loss is the mean over its own labeled tokens, and of an example
    that is a conversation all turns are clipped together.

    Args:
        model: a model, or a name or path, loaded as TRL does.
        args: :class:`DPSFTConfig`.
        train_dataset, eval_dataset: with a text column, ``prompt`` and ``completion``, or
            ``messages``; or tokenized.
        processing_class: the tokenizer; None for the model's.
        quantization_config: for a model that is loaded by name.
        peft_config: as in :class:`DPTrainer`.
        formatting_func: makes a text of one row, and must not look at others.
        trainer_arguments: the other keywords of :class:`DPTrainer`.

    Raises: as :class:`DPTrainer`; DataError for rows that TRL cannot prepare one by one.
    """

    args: DPSFTConfig
    arguments_class: ClassVar[type[DPTrainingArguments]] = DPSFTConfig

    def __init__(
        self,
        model: Any,
        args: DPSFTConfig | None = None,
        data_collator: Callable[[list[Any]], dict[str, Any]] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Callable[[dict[str, Any]], str] | None = None,
        **trainer_arguments: Any,
    ):
        checked: Any = own_copy(args, self.arguments_class)
        check_train_dataset(train_dataset)
        check_rows(train_dataset)
        rows = Rows.of(checked, train_dataset, eval_dataset)
        train_dataset = rows.data
        _refuse_new_tokens(checked, peft_config)
        _refuse_ignored_formatting(formatting_func, train_dataset)
        self._raw_rows = None
        if checked.is_private and not checked.evaluate_on_training_rows:
            # TRL leaves out the columns that it has tokenized.
            self._raw_rows = TrainingRows(train_dataset)
            self._raw_rows.refuse(eval_dataset)
        given = copy.copy(checked)
        if checked.is_private:  # whose a row is, is known by its place; draws are random anyway
            given.shuffle_dataset = False
        self._preparation = SFTPreparation(
            model=model,
            args=given,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            quantization_config=quantization_config,
            formatting_func=formatting_func,
        )
        prepared = self._preparation.given
        if checked.is_private:
            refuse_dropped_rows(train_dataset, prepared["train_dataset"], checked.max_length)
        super().__init__(
            model=prepared["model"],
            args=args,
            data_collator=prepared["data_collator"],
            train_dataset=replace(rows, data=prepared["train_dataset"]),
            eval_dataset=prepared["eval_dataset"],
            processing_class=prepared["processing_class"],
            peft_config=peft_config,
            **trainer_arguments,
        )

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate, on a data set that may be tokenized or not."""
        return super().evaluate(self._prepared(eval_dataset), *args, **kwargs)

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Predict, for a data set that may be tokenized or not."""
        return super().predict(self._prepared(test_dataset), *args, **kwargs)

    def _prepared(self, dataset: Any) -> Any:
        if self._raw_rows is not None and not isinstance(dataset, str):
            self._raw_rows.refuse(dataset)
        return self._preparation.of_evaluation(dataset)


def _refuse_new_tokens(args: Any, peft_config: Any) -> None:
    path = args.chat_template_path
    if peft_config is not None and path is not None and not path.endswith((".jinja", ".j2")):
        raise invalid(
            "chat_template_path",
            path,
            "to be a Jinja file with `peft_config`",
            "A tokenizer may bring tokens of its own, whose embeddings the adapter would not "
            "train. Save its chat_template to a .jinja file.",
            UnsupportedArgumentError,
        )


def _refuse_ignored_formatting(formatting_func: Any, dataset: Any) -> None:
    """Raise InvalidArgumentError where TRL would make texts and then train on other columns."""
    ignored = [name for name in ("prompt", "messages") if name in dataset.column_names]
    if formatting_func is not None and ignored:
        raise invalid(
            "formatting_func",
            getattr(formatting_func, "__name__", formatting_func),
            f"to be None for a data set with the column {ignored[0]!r}",
            "TRL trains on that column and ignores the text. Remove one of the two.",
        )
