"""``DPDPOTrainer``: private direct preference optimization on pairs that TRL prepares.

Needs TRL: ``pip install hf-dp[trl]``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import TrainingArguments

try:
    from trl import DPOConfig
except ImportError as missing:
    raise ImportError("hf_dp.trainer.dpo needs TRL. Run `pip install hf-dp[trl]`.") from missing
from trl.trainer.utils import disable_dropout_in_model

from hf_dp._arguments import Problems
from hf_dp._validate import invalid, positive
from hf_dp.errors import DataError
from hf_dp.losses import (
    IGNORED_LABEL,
    labels_at_their_tokens,
    number_of_targets,
    per_example_loss,
)
from hf_dp.overlap import TrainingRows
from hf_dp.run.checks import check_train_dataset
from hf_dp.run.synthetic import synthetic_examples
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.from_arguments import own_copy
from hf_dp.trainer.inherited import Refusal
from hf_dp.trainer.rows import Rows
from hf_dp.trainer.trainer import DPTrainer
from hf_dp.trainer.trl_preparation import (
    DPOPreparation,
    check_rows,
    each_set,
    refuse_dropped_rows,
)

_REFERENCES = ("ref_chosen_logps", "ref_rejected_logps")
_PAIR = ("prompt_ids", "chosen_ids", "rejected_ids", *_REFERENCES)
# By these rows are compared with each other, whatever other columns they have.
_ENCODED_PAIR = frozenset(_PAIR[:3])

# They concern the model, or each pair by itself; or they are read only with an argument that is
# refused. Reference log-probabilities are always computed before training, one row at a time.
DPO_WORKS = frozenset(
    """
    model_init_kwargs trust_remote_code disable_dropout dataset_num_proc max_length
    truncation_mode pad_to_multiple_of pad_token beta precompute_ref_log_probs
    precompute_ref_batch_size f_alpha_divergence_coef discopop_tau ref_model_mixup_alpha
    ref_model_sync_steps
    """.split()
)


def _only(*allowed: Any, expected: str, reason: str) -> Refusal:
    return Refusal(lambda value: value not in allowed, expected, reason)


_ANOTHER_LOSS = "The loss of a pair is -log sigmoid(beta * margin), and none of its variants."
_NOT_RUN = "TRL's own training step does not run, so it would be silently ignored."
DPO_REFUSED: Mapping[str, Refusal] = MappingProxyType(
    {
        "loss_type": _only(
            ["sigmoid"], "sigmoid", expected='to be ["sigmoid"]', reason=_ANOTHER_LOSS
        ),
        "loss_weights": _only(None, expected="to be None", reason=_ANOTHER_LOSS),
        "ld_alpha": _only(None, expected="to be None", reason=_ANOTHER_LOSS),
        "f_divergence_type": _only(
            "reverse_kl", expected='to be "reverse_kl"', reason=_ANOTHER_LOSS
        ),
        "label_smoothing": _only(0, expected="to be 0", reason=_ANOTHER_LOSS),
        "use_weighting": _only(False, expected="to be False", reason=_ANOTHER_LOSS),
        "router_aux_loss_coef": _only(
            None,
            0,
            expected="to be None or 0",
            reason="The load-balancing loss is a mean over all tokens of a batch.",
        ),
        "padding_free": _only(
            False, expected="to be False", reason="It flattens a batch into one sequence."
        ),
        "activation_offloading": _only(False, expected="to be False", reason=_NOT_RUN),
        "sync_ref_model": _only(
            False,
            expected="to be False",
            reason="The reference log-probabilities of a pair are computed once, by a frozen "
            "model.",
        ),
    }
)


@dataclass
class DPDPOConfig(DPTrainingArguments, DPOConfig):  # type: ignore[misc]  # learning_rate: float
    r"""
    Configuration of [`DPDPOTrainer`]: the arguments of [`DPTrainingArguments`] and of
    [`~trl.DPOConfig`].

    Whatever [`~transformers.TrainingArguments`] has, too, has the defaults of
    [`DPTrainingArguments`] and not TRL's. Only the loss of the DPO paper is known, `"sigmoid"`.

    Raises:
        UnsupportedArgumentError, InvalidArgumentError: as [`DPTrainingArguments`].
    """

    _VALID_DICT_FIELDS = list(
        dict.fromkeys([*DPTrainingArguments._VALID_DICT_FIELDS, *DPOConfig._VALID_DICT_FIELDS])
    )
    _INHERITED: ClassVar[type[TrainingArguments]] = DPOConfig
    _WORK: ClassVar[frozenset[str]] = DPO_WORKS
    _REFUSED: ClassVar[Mapping[str, Refusal]] = DPO_REFUSED

    def _setting_problems(self) -> Problems:
        found = super()._setting_problems()
        if self.privacy_mode != "dp_sgd":
            found.pop("privacy_mode", None)
            found.unsupported(
                "privacy_mode",
                "to be 'dp_sgd' with DPDPOTrainer",
                "DP-FP trains a last layer on released representations, which have no pairs; and "
                "without privacy, use trl.DPOTrainer.",
            )
        found.attempt("beta", positive, "TRL's default is 0.1.")
        return found


@dataclass
class PairCollator:
    """Make a batch of b pairs: the chosen answers' tokens, the rejected answers' beside them.

    Each column has one row for each pair, (b, T) or (b,), so a pair is one example. Both answers
    of a pair are padded to one length, so where tokens are counted, a pair counts as its longer
    answer.

    Args: collate: TRL's collator, which puts all rejected answers after all chosen ones.
    """

    collate: Callable[[list[Any]], dict[str, Tensor]]

    def __call__(self, rows: list[Any]) -> dict[str, Tensor]:
        """Return the batch of these rows."""
        both = self.collate(rows)
        labels = both["input_ids"].masked_fill(both["completion_mask"] == 0, IGNORED_LABEL)
        batch: dict[str, Tensor] = {}
        for name, value in (
            ("input_ids", both["input_ids"]),
            ("attention_mask", both["attention_mask"]),
            ("labels", labels),
        ):
            batch[name], batch[f"rejected_{name}"] = value[: len(rows)], value[len(rows) :]
        return batch | {name: both[name] for name in _REFERENCES if name in both}


class DPDPOTrainer(DPTrainer):
    """Train privately on preferences: DPTrainer on pairs that :class:`trl.DPOTrainer` prepares.

    A pair of a chosen and a rejected answer is one example, and its loss is
    ``-log sigmoid(beta * margin)``: the margin is by how much more the model prefers the chosen
    answer than the reference model does, in log-probability. The model runs on the chosen and on
    the rejected answers before one backward, so both answers' gradients are clipped together.

    The reference model is frozen. It must be public, or the result of a private run that
    ``earlier_runs`` names. What it says of a pair depends on that pair alone: it is computed
    before training, one answer at a time, without padding.

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
    data_collator: Any

    def __init__(
        self,
        model: Any,
        ref_model: nn.Module | None = None,
        args: DPDPOConfig | None = None,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        **trainer_arguments: Any,
    ):
        checked: Any = own_copy(args, self.arguments_class)
        check_train_dataset(train_dataset)
        check_rows(train_dataset)
        rows = Rows.of(checked, train_dataset, eval_dataset)
        train_dataset = rows.data
        if isinstance(model, PeftModel):
            raise invalid(
                "model",
                type(model).__name__,
                "to be a model without adapter",
                "Pass the base model and `peft_config`, or merge_and_unload() the adapter.",
            )
        self._raw_rows = None
        if not checked.evaluate_on_training_rows:
            # TRL leaves out the columns that it has tokenized.
            self._raw_rows = TrainingRows(train_dataset)
            self._raw_rows.refuse(eval_dataset)
        self._preparation = DPOPreparation(
            model=model,
            args=copy.copy(checked),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            quantization_config=quantization_config,
        )
        prepared = self._preparation.given
        refuse_dropped_rows(train_dataset, prepared["train_dataset"], checked.max_length)
        model, tokenizer = prepared["model"], prepared["processing_class"]
        if checked.disable_dropout:
            disable_dropout_in_model(model)
        collator = PairCollator(prepared["data_collator"])
        self._ref_model = ref_model

        def with_references(dataset: Any, name: str = "eval") -> Any:
            reference = model if ref_model is None else ref_model
            return add_references(dataset, reference, collator, checked)

        training = with_references(prepared["train_dataset"])
        evaluation = each_set(prepared["eval_dataset"], with_references)
        checked.padding_values = {
            "rejected_input_ids": tokenizer.pad_token_id,
            "rejected_labels": IGNORED_LABEL,
            **checked.padding_values,
        }
        super().__init__(
            model=model,
            args=checked,
            data_collator=collator,
            train_dataset=replace(rows, data=training),
            eval_dataset=evaluation,
            processing_class=tokenizer,
            peft_config=peft_config,
            **trainer_arguments,
        )

    def margins(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return beta times the margin of each pair, (b,), from that pair alone."""
        chosen = answer_log_probs(model, inputs)
        rejected = answer_log_probs(
            model,
            {
                name: inputs[f"rejected_{name}"]
                for name in ("input_ids", "attention_mask", "labels")
            },
        )
        of_reference = inputs[_REFERENCES[0]] - inputs[_REFERENCES[1]]
        return self.args.beta * (chosen - rejected - of_reference)

    def compute_per_example_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Return -log sigmoid(beta * margin) of each pair, (b,)."""
        return -F.logsigmoid(self.margins(model, inputs))

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Return (mean loss, margins times beta, ones) of a batch of pairs."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            margins = self.margins(model, inputs)
        loss = -F.logsigmoid(margins).mean()
        return (
            (loss, None, None)
            if prediction_loss_only
            else (loss, margins, torch.ones_like(margins))
        )

    def synthetic_batches(self) -> list[Any]:
        """Return made-up pairs, whose answers differ in length."""
        made = [example["input_ids"][0].tolist() for example in synthetic_examples(self.model)]
        rows = [
            {
                "prompt_ids": tokens[:2],
                "chosen_ids": tokens[2:],
                "rejected_ids": others[2:],
                **dict.fromkeys(_REFERENCES, -1.0),
            }
            for tokens, others in zip(made, made[1:] + made[:1], strict=True)
        ]
        return [self.data_collator([row]) for row in rows]

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate, on pairs that may be tokenized or not; the loss is their mean loss."""
        return super().evaluate(self._prepared(eval_dataset), *args, **kwargs)

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Predict margins, of pairs that may be tokenized or not."""
        return super().predict(self._prepared(test_dataset), *args, **kwargs)

    def _prepared(self, dataset: Any) -> Any:
        if self._raw_rows is not None and not isinstance(dataset, str):
            self._raw_rows.refuse(dataset)
        return each_set(dataset, self._with_references)

    def _with_references(self, dataset: Any, name: str) -> Any:
        known = set(dataset.column_names)
        if self._ref_model is None and not set(_REFERENCES) <= known:
            raise DataError(
                "The model may have been trained since this trainer was created, and nothing else "
                "knows the reference. Pass `eval_dataset` when the trainer is created, or "
                "`ref_model`."
            )
        if not known >= _ENCODED_PAIR:
            dataset = self._preparation.of_evaluation(dataset)
        return add_references(dataset, self._ref_model, self.data_collator, self.args)

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns: Any = self._signature_columns or list(_PAIR)


def answer_log_probs(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the log-probability of each row's labeled tokens given what precedes them, (b,).

    Args: inputs: ``input_ids``, ``attention_mask`` and ``labels``, (b, T), -100 on the prompt.
    """
    batch = {name: inputs[name] for name in ("input_ids", "attention_mask", "labels")}
    batch["labels"] = labels_at_their_tokens(model, batch["labels"])
    return -per_example_loss(model, batch) * number_of_targets(model, batch)


def add_references(dataset: Any, model: Any, collator: PairCollator, args: Any) -> Any:
    """Return the data set with the reference's log-probabilities of both answers as columns.

    Each is a function of its row and of the reference model: one answer at a time, without padding.
    A data set that has the columns stays as it is.
    """
    if set(_REFERENCES) <= set(dataset.column_names):
        return dataset
    device = args.device
    if next(model.parameters()).device != device:
        model.to(device)
    training, found = model.training, []
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=bool(args.bf16))
    try:
        model.eval()
        with torch.no_grad(), autocast:
            for row in tqdm(dataset, desc="Reference", disable=bool(args.disable_tqdm)):
                batch = {name: value.to(device) for name, value in collator([row]).items()}
                found.append([_alone(model, batch, ""), _alone(model, batch, "rejected_")])
    finally:
        model.train(training)
    for name, values in zip(_REFERENCES, zip(*found, strict=True), strict=True):
        dataset = dataset.add_column(name, list(values))
    return dataset


def _alone(model: nn.Module, batch: Mapping[str, Tensor], prefix: str) -> float:
    attended = batch[f"{prefix}attention_mask"][0] != 0
    names = ("input_ids", "attention_mask", "labels")
    answer = {name: batch[f"{prefix}{name}"][:, attended] for name in names}
    return float(answer_log_probs(model, answer)[0])
