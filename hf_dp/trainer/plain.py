"""Training without privacy: Trainer's own, on what a tuner chooses. Nothing is claimed of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers.trainer_utils import TrainOutput, get_last_checkpoint

from hf_dp.clipping.sharding import is_sharded
from hf_dp.distributed.processes import Processes
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.losses import means_over_rows
from hf_dp.run.clock import TRAINING as TRAINING_TIME
from hf_dp.run.clock import Clock
from hf_dp.run.other_training import WITHOUT_PRIVACY, note_training, stamp_without_privacy
from hf_dp.run.witnesses import refuse_foreign
from hf_dp.trainer.publishing import Publishing
from hf_dp.trainer.rows import Rows
from hf_dp.trainer.training import Given, Training
from hf_dp.tuners.without_privacy import PlainRun, sampled_batches


class PlainTraining(Training):
    """Trainer's own steps. A tuner chooses by exact numbers what it chooses by noisy ones in
    private modes."""

    is_private = False
    _trainer: Publishing
    _run: PlainRun | None = None  # what a tuner that chooses sees of it

    def take(self, given: Given) -> None:
        given.train_dataset = Rows.of(self.args, given.train_dataset, None).data
        self.prepare_model(given)

    def attach(self, trainer: Publishing) -> None:
        self._trainer = trainer
        self.refuse_optimizers(trainer)
        self.tuner.check_arguments(self.args)
        if means_over_rows(trainer.model):
            # Trainer would take the model, whose forward takes any keyword, to divide by the
            # rows of all accumulated batches, and would add up the means of the batches.
            trainer.model_accepts_loss_kwargs = False

    def train(
        self, resume_from_checkpoint: str | bool | None, stock: Callable[..., TrainOutput]
    ) -> TrainOutput:
        trainer, clock = self._trainer, Clock()
        with clock.part(TRAINING_TIME):
            if self.tuner.undecided:
                self._choose(resume_from_checkpoint, clock)
            try:
                output = stock(resume_from_checkpoint)
            finally:
                if trainer.state.global_step:
                    note_training(trainer.model, WITHOUT_PRIVACY, Path(trainer.folder))
        if trainer.is_world_process_zero() and not resume_from_checkpoint:
            clock.write()
        return output

    def _choose(self, resume_from_checkpoint: str | bool | None, clock: Clock) -> None:
        """Let the tuner choose what trains.

        Raises: UnsupportedArgumentError for a sharded model.
        """
        trainer, args = self._trainer, self.args
        if trainer.is_fsdp_enabled or is_sharded(trainer.model):
            raise UnsupportedArgumentError(
                f"{type(self.tuner).__name__} chooses by whole weights, and the model is sharded "
                "(FSDP). Train it in one process, or without sharding."
            )
        random = np.random.default_rng(args.seed)
        dataset, collator = trainer.columns_for_training()

        def sample(rate: float) -> Iterator[Any]:
            size = args.per_device_train_batch_size
            for batch in sampled_batches(dataset, collator, rate, size, random):
                yield trainer._prepare_inputs(batch)

        def losses(model: nn.Module, batch: Any) -> Tensor:
            with trainer.compute_loss_context_manager():
                return trainer.compute_per_example_loss(model, batch)

        here = Processes.here()
        self._run = PlainRun(trainer.model, args.device, here, sample, losses, clock)
        checkpoint: Any = resume_from_checkpoint or None
        if checkpoint is True:
            checkpoint = get_last_checkpoint(trainer.folder)
        self.tuner.start_plain(self._run, checkpoint)
        trainer.train_model(self._run.model)

    def step(self, model: nn.Module, inputs: Any, stock: Callable[[], Tensor]) -> Tensor:
        if self._run is not None:
            self.tuner.before_plain_step(self._run, self._trainer.state.global_step)
        return stock()

    def loader(self, stock: Callable[[], DataLoader]) -> DataLoader:
        return stock()

    def prepare(self, max_steps: int, stock: Callable[[], Any]) -> Any:
        return stock()

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        return optimizer

    def operations(self, stock: Callable[[], int]) -> int:
        return stock()

    def batch_size(self, stock: Callable[[], int]) -> int:
        return stock()

    def evaluates(self, evaluation: Any) -> None:
        pass

    def search(self, stock: Callable[[], Any]) -> Any:
        return stock()

    def log(self, logs: dict[str, float], stock: Callable[[dict[str, float]], None]) -> None:
        stock(logs)

    def save(self, folder: str, stock: Callable[[], None]) -> None:
        refuse_foreign(Path(folder), None)
        stock()
        if not self.args.should_save:
            return
        if self._run is not None:
            self.tuner.save(folder)
        if self._trainer.state.global_step:
            stamp_without_privacy(folder)

    def write_card(self, options: Mapping[str, Any], stock: Callable[[], None]) -> None:
        stock()
