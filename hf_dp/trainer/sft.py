"""``DPSFTTrainer``: private supervised fine-tuning on data that TRL's SFTTrainer prepares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from datasets import Dataset
from peft import PeftConfig
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from hf_dp._validate import invalid
from hf_dp.batches.examples import Collator
from hf_dp.batches.structure import Row
from hf_dp.trainer import trl_preparation as trl
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.inherited import Refusal, only

_PACKING = only(
    "It joins several rows in one sequence, so no single row could be clipped. If you pack texts "
    "beforehand, a packed row is what is protected (rows_are_chunks=True).",
    False,
    None,
)
# The order of rows changes no draw, and `packing_strategy` is read only with `packing`.
SFT_WORKS = trl.LM_WORKS | frozenset(
    """eos_token dataset_text_field dataset_kwargs completion_only_loss
    assistant_only_loss packing_strategy shuffle_dataset""".split()
)
SFT_REFUSED: Mapping[str, Refusal] = {
    **trl.LM_REFUSED,
    "chat_template_path": trl.TEMPLATE,
    "packing": _PACKING,
    "eval_packing": _PACKING,
    "loss_type": only(
        "TRL's other losses divide by the tokens of the whole batch. Override "
        "compute_per_example_loss instead.",
        "nll",
        "chunked_nll",
    ),
}


@dataclass
class DPSFTConfig(DPTrainingArguments, trl.SFTConfig):  # type: ignore[misc]  # learning_rate: float
    r"""
    Configuration of [`DPSFTTrainer`]: the arguments of [`DPTrainingArguments`] and of
    [`~trl.SFTConfig`].

    Arguments of [`~transformers.TrainingArguments`] have the defaults of [`DPTrainingArguments`],
    not TRL's: full precision, no gradient checkpointing, a learning rate of 5e-5. What joins
    rows or divides by a batch's tokens is refused, even without privacy.

    Raises:
        UnsupportedArgumentError, InvalidArgumentError: as [`DPTrainingArguments`].
    """

    _VALID_DICT_FIELDS = list(
        dict.fromkeys([*DPTrainingArguments._VALID_DICT_FIELDS, *trl.SFTConfig._VALID_DICT_FIELDS])
    )
    _INHERITED: ClassVar[type[TrainingArguments]] = trl.SFTConfig
    _WORK: ClassVar[frozenset[str]] = SFT_WORKS
    _REFUSED: ClassVar[Mapping[str, Refusal]] = SFT_REFUSED


class DPSFTTrainer(trl.PreparedByTRL):
    """Fine-tune privately on texts, prompts with completions, or conversations: DPTrainer on what
    :class:`trl.SFTTrainer` prepares.

    Tokenizing, chat templates, end tokens, labels and truncation are TRL's own functions, and treat
    each row by itself. An example's loss is the mean over its own labeled tokens, and all turns of
    a conversation are clipped together.

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
    preparation = trl.SFTPreparation

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: DPSFTConfig | None = None,
        data_collator: Collator | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: trl.DataSets = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        *,
        quantization_config: object = None,
        peft_config: PeftConfig | None = None,
        formatting_func: Callable[[Row], str] | None = None,
        **trainer_arguments: Any,
    ):
        _refuse_ignored_formatting(formatting_func, train_dataset)
        super().__init__(
            args,
            train_dataset,
            eval_dataset,
            {
                "model": model,
                "data_collator": data_collator,
                "processing_class": processing_class,
                "quantization_config": quantization_config,
                "formatting_func": formatting_func,
            },
            peft_config,
            **trainer_arguments,
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
