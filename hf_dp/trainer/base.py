"""What all parts of a DPTrainer know of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import datasets
from torch import Tensor, nn
from transformers import Trainer

from hf_dp.mechanisms import Mechanism
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.run.checks import check_head_is_trainable
from hf_dp.run.private_run import PrivateRun


class RunTrainer(Trainer):
    """A Trainer that may have a private run.

    Attributes: mechanism: its step, where it has one. card: what the user said of the card.
    """

    model: Any
    card: dict[str, Any]
    mechanism: Mechanism
    privacy_plan: PrivacyPlan | None = None
    _run: PrivateRun | None = None
    _evaluation: dict[str, float]  # the latest metrics

    @property
    def folder(self) -> str:
        """The run's output folder."""
        return str(self.args.output_dir)

    def compute_per_example_loss(self, model: nn.Module, inputs: Any) -> Tensor:
        """Return one loss per example, (b,)."""
        raise NotImplementedError

    def synthetic_batches(self) -> list[Any]:
        """Return made-up examples, each a batch of one."""
        raise NotImplementedError

    def columns_for_training(self) -> tuple[Any, Callable[..., Any]]:
        """Return dataset and collator, without the columns that the model's forward does not take,
        as Trainer does."""
        if isinstance(self.train_dataset, datasets.Dataset):
            return self._remove_unused_columns(
                self.train_dataset, description="Training"
            ), self.data_collator
        return self.train_dataset, self._get_collator_with_removed_columns(
            self.data_collator, description="Training"
        )

    def train_model(self, model: nn.Module) -> None:
        """Train the model that the tuner made, from before the optimizer exists."""
        if model is not self.model:
            self.model = self.model_wrapped = self.callback_handler.model = model
            check_head_is_trainable(model)
