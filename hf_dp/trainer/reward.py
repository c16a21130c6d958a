"""``DPRewardTrainer``: a private reward model, from pairs of texts that TRL prepares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from datasets import Dataset
from peft import PeftConfig
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from hf_dp._validate import invalid
from hf_dp.batches.structure import Batch
from hf_dp.losses import each_row_read_as_alone, widened, with_position_ids
from hf_dp.trainer import trl_preparation as trl
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.inherited import Refusal, only

_TEXTS = ("chosen_ids", "rejected_ids")
_MARGIN = "margin"

REWARD_WORKS = trl.TRL_WORKS | {"eos_token", "disable_dropout"}
REWARD_REFUSED: Mapping[str, Refusal] = {
    **trl.TRL_REFUSED,
    "privacy_mode": only(
        "DP-FP releases representations of texts, not pairs. Without privacy, use "
        "trl.RewardTrainer.",
        "dp_sgd",
    ),
    "chat_template_path": trl.TEMPLATE,
    "center_rewards_coefficient": Refusal(
        lambda value: value is None or (isinstance(value, (int, float)) and 0 <= value < math.inf),
        "to be >= 0, or None",
        "TRL recommends 0.01.",
    ),
}


@dataclass
class DPRewardConfig(DPTrainingArguments, trl.RewardConfig):  # type: ignore[misc]  # learning_rate
    r"""
    Configuration of [`DPRewardTrainer`]: the arguments of [`DPTrainingArguments`] and of
    [`~trl.RewardConfig`].

    Arguments of [`~transformers.TrainingArguments`] have the defaults of [`DPTrainingArguments`],
    not TRL's.

    Raises:
        UnsupportedArgumentError, InvalidArgumentError: as [`DPTrainingArguments`].
    """

    _VALID_DICT_FIELDS = list(
        dict.fromkeys(
            [*DPTrainingArguments._VALID_DICT_FIELDS, *trl.RewardConfig._VALID_DICT_FIELDS]
        )
    )
    _INHERITED: ClassVar[type[TrainingArguments]] = trl.RewardConfig
    _WORK: ClassVar[frozenset[str]] = REWARD_WORKS
    _REFUSED: ClassVar[Mapping[str, Refusal]] = REWARD_REFUSED


class DPRewardTrainer(trl.TrainedOnPairs):
    """Train a reward model privately: DPTrainer on pairs that :class:`trl.RewardTrainer` prepares.

    A pair of a chosen and a rejected text is one example. Its loss is that of Bradley and Terry,
    ``-log sigmoid(r(chosen) - r(rejected) - margin)``, plus ``center_rewards_coefficient`` times
    ``(r(chosen) + r(rejected))^2`` (Eisenstein et al. 2023, arXiv 2312.09244, eq. 2).

    Predictions are the rewards of both texts, (rows, 2), and their ``label_ids`` are 0, the place
    of the chosen one. Without ``compute_metrics`` an evaluation reports TRL's numbers, over all of
    its rows: accuracy, margin, and the smallest, mean and largest reward.

    Args:
        model: a sequence classifier with one output, or a name or path, loaded as TRL does.
        args: :class:`DPRewardConfig`.
        train_dataset, eval_dataset: with ``chosen`` and ``rejected``, texts or messages, perhaps
            ``prompt``, and perhaps ``margin``, a number by which the chosen text is better.
        processing_class: the tokenizer; None for the model's.
        quantization_config: for a model that is loaded by name.
        peft_config: as in :class:`DPTrainer`. The head must train: ``task_type="SEQ_CLS"``.
        trainer_arguments: the other keywords of :class:`DPTrainer`, without ``data_collator``.

    Raises: as :class:`DPTrainer`; DataError for rows that TRL cannot prepare one by one.
    """

    args: DPRewardConfig
    arguments_class: ClassVar[type[DPTrainingArguments]] = DPRewardConfig
    preparation = trl.RewardPreparation

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: DPRewardConfig | None = None,
        *,
        train_dataset: Dataset | None = None,
        eval_dataset: trl.DataSets = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        quantization_config: object = None,
        peft_config: PeftConfig | None = None,
        **trainer_arguments: Any,
    ):
        of_trl = {
            "model": model,
            "processing_class": processing_class,
            "quantization_config": quantization_config,
        }
        trl.report_metrics(reward_metrics, trainer_arguments, args)
        super().__init__(
            args, train_dataset, eval_dataset, of_trl, peft_config, **trainer_arguments
        )

    def _check_model(self, model: object) -> None:
        if getattr(getattr(model, "config", None), "num_labels", None) != 1:
            raise invalid(
                "model",
                type(model).__name__,
                "to be a sequence classifier with one output, the reward",
                "Load it by AutoModelForSequenceClassification.from_pretrained(..., num_labels=1).",
            )

    def rewards(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the rewards of the chosen and of the rejected texts, (b, 2)."""
        found = []
        for prefix in ("", "rejected_"):
            texts = {name: inputs[f"{prefix}{name}"] for name in ("input_ids", "attention_mask")}
            with each_row_read_as_alone(model):
                found.append(model(**with_position_ids(model, texts)).logits[:, 0])
        return widened(torch.stack(found, 1))

    def scored(self, model: nn.Module, inputs: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss of each pair, (b,), its rewards, (b, 2), and zeros, (b,)."""
        rewards = self.rewards(model, inputs)
        chosen, rejected = rewards.unbind(1)
        losses = -F.logsigmoid(chosen - rejected - inputs.get(_MARGIN, torch.zeros_like(chosen)))
        centering = self.args.center_rewards_coefficient or 0.0
        losses = losses + centering * (chosen + rejected).square()
        return losses, rewards, torch.zeros(len(rewards), dtype=torch.long, device=rewards.device)

    def synthetic_batches(self) -> list[dict[str, Tensor]]:
        """Return synthetic pairs, whose texts differ in length."""
        known = self.train_dataset.column_names if isinstance(self.train_dataset, Dataset) else ()
        margin = {_MARGIN: 0.5} if _MARGIN in known else {}
        return [
            self.data_collator([{**dict(zip(_TEXTS, texts, strict=True)), **margin}])
            for texts in self.made_up_pairs()
        ]

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns: Any = [*_TEXTS, _MARGIN]


def reward_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Return what TRL logs of an evaluation: the share of pairs whose chosen text has the larger
    reward, by how much on average, and the least, mean and largest reward."""
    rewards = trl.predictions_of(prediction)
    margins = rewards[:, 0] - rewards[:, 1]
    return {
        "accuracy": float((margins > 0).mean()),
        "margin": float(margins.mean()),
        "min_reward": float(rewards.min()),
        "mean_reward": float(rewards.mean()),
        "max_reward": float(rewards.max()),
    }
