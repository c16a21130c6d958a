"""The points at which a run asks how privacy is obtained."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from hf_dp.plan import PrivacyPlan


class Mode:
    """One way to obtain privacy. ``trainer`` is the :class:`hf_dp.trainer.trainer.DPTrainer` that
    runs."""

    def start(self, trainer: Any, checkpoint: str | None) -> None:
        """Before the optimizer exists: decide what of the model trains, release what is released
        once."""

    def prepare(self, trainer: Any) -> None:
        """Before the first step is recorded; raise for what would not work."""

    def loader(self, trainer: Any) -> DataLoader:
        """What is iterated: one item is one step's input."""
        raise NotImplementedError

    def step(self, trainer: Any, inputs: Any) -> Tensor:
        """One optimizer step's gradients in ``p.grad``, recorded durably before; returns the sum of
        losses, not noised."""
        raise NotImplementedError


def nominal_epoch(plan: PrivacyPlan) -> int:
    """Steps after which every example was drawn once on average; Trainer iterates such epochs until
    ``max_steps``."""
    return max(1, round(plan.num_examples / plan.expected_batch_size))
