"""``DPSFTTrainer``: private supervised fine-tuning on data that TRL's SFTTrainer prepares.

Needs TRL: ``pip install hf-dp[trl]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

from datasets import Dataset
from peft import PeftConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from hf_dp._arguments import Problems
from hf_dp._validate import invalid
from hf_dp.batches.examples import Collator
from hf_dp.batches.structure import Row
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.from_arguments import own_copy
from hf_dp.trainer.inherited import Refusal
from hf_dp.trainer.trl_preparation import (
    TRL_REFUSED,
    TRL_WORKS,
    DataSets,
    PreparedByTRL,
    SFTConfig,
    SFTPreparation,
    only,
)

_PACKING = only(
    False,
    None,
    reason="It joins several rows in one sequence, so no single row could be clipped.",
    move="Remove it. If you pack texts beforehand, a packed row is what is protected "
    "(rows_are_chunks=True).",
)
# The order of rows changes no draw, and `packing_strategy` is read only with `packing`.
SFT_WORKS = TRL_WORKS | frozenset(
    """
    chat_template_path eos_token dataset_text_field dataset_kwargs completion_only_loss
    assistant_only_loss packing_strategy shuffle_dataset
    """.split()
)
SFT_REFUSED: Mapping[str, Refusal] = MappingProxyType(
    {
        **TRL_REFUSED,
        "packing": _PACKING,
        "eval_packing": _PACKING,
        "loss_type": only(
            "nll",
            "chunked_nll",
            reason="Each example's loss is the mean negative log-likelihood of its own labeled "
            "tokens; TRL's other losses divide by the tokens of the whole batch.",
            move="Remove it, or override compute_per_example_loss.",
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


class DPSFTTrainer(PreparedByTRL):
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
        model: str | PreTrainedModel,
        args: DPSFTConfig | None = None,
        data_collator: Collator | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: DataSets = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        *,
        quantization_config: Any = None,
        peft_config: PeftConfig | None = None,
        formatting_func: Callable[[Row], str] | None = None,
        **trainer_arguments: Any,
    ):
        checked: Any = own_copy(args, self.arguments_class)
        _refuse_new_tokens(checked, peft_config)
        _refuse_ignored_formatting(formatting_func, train_dataset)
        made, rows = self._prepare_rows(
            SFTPreparation,
            checked,
            train_dataset,
            eval_dataset,
            model=model,
            data_collator=data_collator,
            processing_class=processing_class,
            quantization_config=quantization_config,
            formatting_func=formatting_func,
        )
        super().__init__(
            model=made.model,
            args=args,
            data_collator=made.data_collator,
            train_dataset=replace(rows, data=made.train_dataset),
            eval_dataset=made.eval_dataset,
            processing_class=made.processing_class,
            peft_config=peft_config,
            **trainer_arguments,
        )


def _refuse_new_tokens(args: SFTConfig, peft_config: PeftConfig | None) -> None:
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


def _refuse_ignored_formatting(
    formatting_func: Callable[[Row], str] | None, dataset: Dataset | None
) -> None:
    """Raise InvalidArgumentError where TRL would make texts and then train on other columns."""
    columns = getattr(dataset, "column_names", ())
    ignored = [name for name in ("prompt", "messages") if name in columns]
    if formatting_func is not None and ignored:
        raise invalid(
            "formatting_func",
            getattr(formatting_func, "__name__", formatting_func),
            f"to be None for a data set with the column {ignored[0]!r}",
            "TRL trains on that column and ignores the text. Remove one of the two.",
        )
