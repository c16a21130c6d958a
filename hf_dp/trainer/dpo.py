"""``DPDPOTrainer``: private direct preference optimization on pairs that TRL prepares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from datasets import Dataset
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from hf_dp._validate import invalid
from hf_dp.batches.structure import Batch
from hf_dp.errors import DataError, UnsupportedArgumentError
from hf_dp.losses import IGNORED_LABEL, labels_at_their_tokens, number_of_targets, per_example_loss
from hf_dp.trainer import trl_preparation as trl
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.inherited import Refusal, only

_TOKENS = ("input_ids", "attention_mask", "labels")  # of an answer after its prompt, (b, T) each
_REFERENCES = ("ref_chosen_logps", "ref_rejected_logps")
# By these rows are compared with each other, whatever other columns they have.
_ENCODED_PAIR = ("prompt_ids", "chosen_ids", "rejected_ids")

# Reference log-probabilities are always computed before training, one row at a time. Others than
# the first are read only with what is refused, or not at all.
DPO_WORKS = trl.LM_WORKS | frozenset(
    """disable_dropout precompute_ref_log_probs precompute_ref_batch_size
    f_alpha_divergence_coef discopop_tau ref_model_mixup_alpha ref_model_sync_steps""".split()
)
_LOSS = "The loss of a pair is -log sigmoid(beta * margin), and none of its variants. Remove it."
DPO_REFUSED: Mapping[str, Refusal] = {
    **trl.LM_REFUSED,
    "privacy_mode": only(
        "DP-FP releases representations of texts, not pairs. Without privacy, use trl.DPOTrainer.",
        "dp_sgd",
    ),
    "beta": Refusal(
        lambda beta: isinstance(beta, (int, float)) and 0 < beta < math.inf,
        "to be > 0",
        "TRL's default is 0.1.",
    ),
    "loss_type": only(_LOSS, ["sigmoid"], "sigmoid"),
    "loss_weights": only(_LOSS, None),
    "ld_alpha": only(_LOSS, None),
    "f_divergence_type": only(_LOSS, "reverse_kl"),
    "label_smoothing": only(_LOSS, 0),
    "use_weighting": only(_LOSS, False),
    "sync_ref_model": only("The reference is a frozen model. Remove it.", False),
}


@dataclass
class DPDPOConfig(DPTrainingArguments, trl.DPOConfig):  # type: ignore[misc]  # learning_rate: float
    r"""
    Configuration of [`DPDPOTrainer`]: the arguments of [`DPTrainingArguments`] and of
    [`~trl.DPOConfig`].

    Arguments of [`~transformers.TrainingArguments`] have the defaults of [`DPTrainingArguments`],
    not TRL's. Only the loss of the DPO paper is known, `"sigmoid"`.

    Raises:
        UnsupportedArgumentError, InvalidArgumentError: as [`DPTrainingArguments`].
    """

    _VALID_DICT_FIELDS = list(
        dict.fromkeys([*DPTrainingArguments._VALID_DICT_FIELDS, *trl.DPOConfig._VALID_DICT_FIELDS])
    )
    _INHERITED: ClassVar[type[TrainingArguments]] = trl.DPOConfig
    _WORK: ClassVar[frozenset[str]] = DPO_WORKS
    _REFUSED: ClassVar[Mapping[str, Refusal]] = DPO_REFUSED


class DPDPOTrainer(trl.TrainedOnPairs):
    """Train privately on preferences: DPTrainer on pairs that :class:`trl.DPOTrainer` prepares.

    A pair of a chosen and a rejected answer is one example, and its loss is
    ``-log sigmoid(beta * margin)``: the margin is by how much more the model prefers the chosen
    answer than the reference model does, in log-probability. The model runs on the chosen and on
    the rejected answers before one backward, so both answers' gradients are clipped together.

    The reference model is frozen. One of your own must be public (``teacher_is_public=True`` says
    so) or the result of a private run that ``earlier_runs`` names. Its output for a pair depends on
    that pair alone: it is computed before training, one answer at a time, without padding.

    Predictions are margins times beta, (rows,), and their ``label_ids`` are 1.

    Args:
        model: a model, or a name or path, loaded as TRL does; not a PeftModel.
        ref_model: the reference model; None for ``model`` as it is before training, without the
            adapter of ``peft_config``.
        args: :class:`DPDPOConfig`.
        train_dataset, eval_dataset: with ``prompt``, ``chosen`` and ``rejected``, texts or
            messages.
        processing_class: the tokenizer; None for the model's.
        quantization_config: for a model that is loaded by name.
        peft_config: as in :class:`DPTrainer`.
        trainer_arguments: the other keywords of :class:`DPTrainer`, without ``data_collator``.

    Raises: as :class:`DPTrainer`; DataError for rows that TRL cannot prepare one by one.
    """

    args: DPDPOConfig
    arguments_class: ClassVar[type[DPTrainingArguments]] = DPDPOConfig
    preparation = trl.DPOPreparation
    _ref_model: nn.Module | None

    def __init__(
        self,
        model: str | PreTrainedModel,
        ref_model: nn.Module | None = None,
        args: DPDPOConfig | None = None,
        *,
        train_dataset: Dataset | None = None,
        eval_dataset: trl.DataSets = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        quantization_config: object = None,
        peft_config: PeftConfig | None = None,
        **trainer_arguments: Any,
    ):
        if isinstance(model, PeftModel):
            raise invalid(
                "model",
                type(model).__name__,
                "to be a model without adapter",
                "Pass the base model and `peft_config`, or merge_and_unload() the adapter.",
            )
        self._ref_model = None if ref_model is model else ref_model
        of_trl = {
            "model": model,
            "processing_class": processing_class,
            "quantization_config": quantization_config,
        }
        super().__init__(
            args, train_dataset, eval_dataset, of_trl, peft_config, **trainer_arguments
        )

    def _complete(self, made: trl.Preparation, args: Any) -> None:
        """Add what the reference model says, which is the model itself where none was given."""
        super()._complete(made, args)
        labels = dict.fromkeys(("labels", "rejected_labels"), IGNORED_LABEL)
        args.padding_values = labels | args.padding_values
        reference = made.model if self._ref_model is None else self._ref_model
        known = args.teacher_is_public or args.earlier_runs or not args.is_private
        if reference is not made.model and not known:
            raise invalid(
                "teacher_is_public",
                False,
                "to be True with a `ref_model` that is not the result of one of `earlier_runs`",
                "Each pair's loss reads it: if it was trained on these pairs, each would depend on "
                "the others. If it saw only public data, say so; the card repeats it. Or leave "
                "`ref_model` out: the model as it is before training.",
                UnsupportedArgumentError,
            )

        def with_references(dataset: Dataset, name: str) -> Dataset:
            return add_references(dataset, reference, made.data_collator, args)

        made.train_dataset = with_references(made.train_dataset, "train")
        made.eval_dataset = trl.each_set(made.eval_dataset, with_references)

    def margins(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return beta times the margin of each pair, (b,), from that pair alone."""
        chosen = answer_log_probs(model, inputs)
        rejected = answer_log_probs(model, inputs, "rejected_")
        of_reference = inputs[_REFERENCES[0]] - inputs[_REFERENCES[1]]
        return self.args.beta * (chosen - rejected - of_reference)

    def scored(self, model: nn.Module, inputs: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return -log sigmoid(beta * margin), margins times beta, and ones, (b,) each."""
        margins = self.margins(model, inputs)
        return -F.logsigmoid(margins), margins, torch.ones_like(margins)

    def synthetic_batches(self) -> list[dict[str, Tensor]]:
        """Return synthetic pairs, whose answers differ in length."""
        return [
            self.data_collator(
                [
                    {
                        "prompt_ids": chosen[:2],
                        "chosen_ids": chosen[2:],
                        "rejected_ids": rejected[2:],
                        **dict.fromkeys(_REFERENCES, -1.0),
                    }
                ]
            )
            for chosen, rejected in self.made_up_pairs()
        ]

    def _prepare(self, rows: Dataset, name: str) -> Dataset:
        known = set(rows.column_names)
        if not known >= set(_ENCODED_PAIR):
            rows = super()._prepare(rows, name)
        if known >= set(_REFERENCES):
            return rows
        if self._ref_model is None:
            raise DataError(
                "The model may already have been trained, and there is no other copy of the "
                "reference. Pass `eval_dataset` when the trainer is created, or `ref_model`."
            )
        return add_references(rows, self._ref_model, self.data_collator, self.args)

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns: Any = [*_ENCODED_PAIR, *_REFERENCES]


def answer_log_probs(model: nn.Module, inputs: Mapping[str, Tensor], prefix: str = "") -> Tensor:
    """Return the log-probability of each row's labeled tokens given what precedes them, (b,). The
    columns of ``inputs`` are (b, T), with -100 on the prompt in ``labels``.
    """
    batch = {name: inputs[f"{prefix}{name}"] for name in _TOKENS}
    batch["labels"] = labels_at_their_tokens(model, batch["labels"])
    return -per_example_loss(model, batch) * number_of_targets(model, batch)


def add_references(
    dataset: Dataset, model: nn.Module, collator: trl.PairCollator, args: TrainingArguments
) -> Dataset:
    """Return the data set with the reference's log-probabilities of both answers as columns. Each
    is a function of its row alone: one answer at a time, without padding."""
    if set(_REFERENCES) <= set(dataset.column_names):
        return dataset
    device, training = args.device, model.training
    bf16 = args.mixed_precision == "bf16"
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16)
    found: dict[str, list[float]] = {name: [] for name in _REFERENCES}
    if next(model.parameters()).device != device:
        model.to(device)
    try:
        model.eval()
        with torch.no_grad(), autocast:
            for row in tqdm(dataset, desc="Reference", disable=bool(args.disable_tqdm)):
                batch = {name: value.to(device) for name, value in collator([row]).items()}
                for name, prefix in zip(_REFERENCES, ("", "rejected_"), strict=True):
                    attended = batch[f"{prefix}attention_mask"][0] != 0
                    answer = {each: batch[f"{prefix}{each}"][:, attended] for each in _TOKENS}
                    found[name].append(float(answer_log_probs(model, answer)))
    finally:
        model.train(training)
    for name, values in found.items():
        dataset = dataset.add_column(name, values)
    return dataset
