"""DP-FROST in a run: once before training, as an adapter; or repeatedly, in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.utils import logging

from hf_dp._validate import invalid
from hf_dp.selection_plan import SelectionPlan
from hf_dp.trainer.choice.base import (
    Choice,
    freeze_others,
    refuse_made_before,
    refuse_other_options,
)
from hf_dp.trainer.loading import apply_peft, describe_training
from hf_dp.trainer.private_selection import select_partitions
from hf_dp.tuners.frost.config import FrostConfig
from hf_dp.tuners.selection import candidates

logger = logging.get_logger(__name__)


class _Frost(Choice):
    def __init__(self, config: FrostConfig):
        self.config = config
        self._applied = False

    def plan(self, clipping_norm: float) -> SelectionPlan:
        return self.config.selection_plan(clipping_norm)

    def prepare(self, trainer: Any) -> None:
        refuse_made_before(trainer, self.config)
        self.config.candidate_partitions(trainer.model)
        if self.config.num_selections > trainer.privacy_plan.steps:
            raise invalid(
                "num_selections",
                self.config.num_selections,
                f"to be at most the {trainer.privacy_plan.steps} steps of the run",
                "Selections beyond them would be paid for and never made.",
            )

    def start(self, trainer: Any, checkpoint: str | None) -> None:
        if self._applied:
            return
        self.prepare(trainer)  # again: much may have happened since, and from here it costs
        if checkpoint is not None:
            self._read(checkpoint)
        elif not self.config.made:
            self._select(trainer)
        self._apply(trainer)
        self._applied = True

    def _select(self, trainer: Any) -> None:
        made = select_partitions(trainer, self.config)
        self.config.made.append(made)
        logger.info(
            "DP-FROST selected %d of %d partitions.", len(made["partitions"]), made["candidates"]
        )

    def _read(self, checkpoint: str) -> None:
        """Take over what the run chose before; it never chooses the same again."""
        earlier = FrostConfig.from_pretrained(checkpoint)
        refuse_other_options(earlier, self.config)
        self.config.made = earlier.made

    def _apply(self, trainer: Any) -> None:
        raise NotImplementedError

    def describe(self, model: nn.Module) -> str:
        if not self.config.made:
            return describe_training(model)
        return f"{describe_training(model)}: " + "; then ".join(
            f"{len(made['partitions'])} of {made['candidates']} partitions, chosen privately "
            "(DP-FROST; sensitivities "
            f"{', '.join(f'{value:.3g}' for value in made['sensitivities'])}): "
            f"{', '.join(made['partitions'])}"
            for made in self.config.made
        )


class Once(_Frost):
    """K = 1: the model is replaced by an adapter of the selected weights."""

    def _apply(self, trainer: Any) -> None:
        self.config.parameters = list(self.config.made[0]["parameters"])
        trainer.replace_model(apply_peft(trainer.model, self.config, trainer.args.device))


class Repeated(_Frost):
    """K > 1 (section 5.3): chosen again at step ``(k - 1) floor(U / K)`` of U; trains in place,
    saves a whole checkpoint."""

    _may_train: Sequence[nn.Parameter] = ()

    def _apply(self, trainer: Any) -> None:
        freeze_others(trainer.model, self.config)
        self._may_train = [*candidates(trainer.model, self.config)]
        self._switch(trainer.model)

    def _switch(self, model: nn.Module) -> None:
        selected = set(self.config.made[-1]["parameters"])
        may_train = set(self._may_train)
        for name, parameter in model.named_parameters():
            if parameter in may_train:
                parameter.requires_grad_(name in selected)

    def before_step(self, trainer: Any) -> None:
        every = max(1, trainer.privacy_plan.steps // self.config.num_selections)
        made = len(self.config.made)
        if made < self.config.num_selections and trainer.state.global_step >= made * every:
            with self.all_that_may_train(trainer.model):
                self._select(trainer)
            self._switch(trainer.model)

    def releases_to_come(self) -> int:
        return (
            self.config.num_selections - len(self.config.made)
        ) * self.config.selection_iterations

    @contextmanager
    def all_that_may_train(self, model: nn.Module) -> Iterator[None]:
        before = [(parameter, parameter.requires_grad) for parameter in self._may_train]
        for parameter, _ in before:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter, trained in before:
                parameter.requires_grad_(trained)

    def save(self, folder: str) -> None:
        self.config.write_details(folder)
