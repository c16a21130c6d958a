"""What a trainer does at Trainer's seams, and without privacy: Trainer's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from peft import PeftConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Subset
from transformers.trainer_utils import TrainOutput, get_last_checkpoint

from hf_dp._validate import invalid
from hf_dp.batches.structure import Batch, DataSet
from hf_dp.distributed.processes import Processes
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.losses import each_row_read_as_alone, means_over_rows
from hf_dp.plans.dp_fp import DP_FP
from hf_dp.run.clock import TRAINING as TRAINING_TIME
from hf_dp.run.clock import Clock
from hf_dp.run.gguf import dequantized
from hf_dp.run.other_training import note_training, stamp_without_privacy
from hf_dp.run.witnesses import refuse_foreign
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.given import Given, Rows
from hf_dp.trainer.publishing import Publishing
from hf_dp.tuners.base import PlainRun, Tuner, apply_peft, load_model
from hf_dp.tuners.methods import tuner_for

Prepared: TypeAlias = tuple[nn.Module, DataLoader]


class Training:
    """Training without privacy: at each seam Trainer's own method, ``stock``. Private training
    replaces all that have it."""

    is_private = False
    _trainer: Publishing
    _run: PlainRun | None = None  # what a tuner that chooses sees of it

    def __init__(self, args: DPTrainingArguments, peft_config: PeftConfig | None):
        self.args = args
        # Which argument says how long it is; a private run fills in max_steps.
        self.length = "max_steps" if args.max_steps > 0 else "num_train_epochs"
        tuner = tuner_for(peft_config, self.is_private)
        self._wraps = tuner is None and peft_config is not None
        self.tuner = tuner or Tuner()

    # -- before the first step --

    def take(self, given: Given) -> nn.Module | None:
        """Check and prepare what the trainer was given; return the model."""
        given.train_dataset = Rows.of(self.args, given.train_dataset, None).data
        return self.prepared_model(given)

    def prepared_model(self, given: Given) -> nn.Module | None:
        """Return the model, loaded, and wrapped as ``peft_config`` says where no tuner does."""
        args = self.args
        if given.model_init is not None:
            if args.privacy_mode == DP_FP:
                expected, move = "to be None with privacy_mode='dp_fp'", "Pass the model."
                raise invalid("model_init", given.model_init, expected, move)
            if given.peft_config is not None:
                expected, move = "to be None with `model_init`", "Wrap the model in model_init."
                raise invalid("peft_config", given.peft_config, expected, move)
        model = loaded(given.model)
        if model is None or given.peft_config is None or not self._wraps:
            return model
        return apply_peft(model, given.peft_config, args.device, args.seed)

    def attach(self, trainer: Publishing) -> None:
        """Begin to serve a trainer whose constructor has run. Nothing is written yet."""
        self._trainer = trainer
        self.refuse_optimizers()
        self.tuner.check_arguments(self.args)
        if means_over_rows(trainer.model):
            # Trainer would take the model, whose forward takes any keyword, to divide by the
            # rows of all accumulated batches, and would add up the means of the batches.
            trainer.model_accepts_loss_kwargs = False

    def refuse_optimizers(self) -> None:
        """Raise InvalidArgumentError for an optimizer made before it is known what trains."""
        optimizer, scheduler = self._trainer.optimizer, self._trainer.lr_scheduler
        if self.tuner.undecided and (optimizer is not None or scheduler is not None):
            raise invalid(
                "optimizers",
                type(optimizer).__name__,
                "to be (None, None) with this peft_config",
                "What trains is chosen when train() starts; set `optim` in the arguments instead.",
            )

    def _choose(self, resume_from_checkpoint: str | bool | None, clock: Clock) -> None:
        """Let the tuner choose what trains."""
        trainer, args = self._trainer, self.args
        if trainer.in_shards:
            raise UnsupportedArgumentError(
                f"{type(self.tuner).__name__} chooses by whole weights, and the model is sharded "
                "(FSDP). Train it in one process, or without sharding."
            )
        random = np.random.default_rng(args.seed)
        dataset, collator = trainer.columns_for_training()

        def sample(rate: float) -> Iterator[Batch]:
            chosen = np.flatnonzero(random.random(len(dataset)) < rate).tolist()
            size = args.per_device_train_batch_size
            for batch in DataLoader(Subset(dataset, chosen), size, collate_fn=collator):
                yield trainer._prepare_inputs(batch)

        def losses(model: nn.Module, batch: Batch) -> Tensor:
            with trainer.compute_loss_context_manager():
                return trainer.compute_per_example_loss(model, batch)

        here = Processes.here()
        self._run = PlainRun(trainer.model, args.device, here, sample, losses, clock)
        checkpoint = resume_from_checkpoint or None
        if checkpoint is True:
            checkpoint = get_last_checkpoint(trainer.folder)
        self.tuner.start(self._run, checkpoint)
        trainer.train_model(self._run.model)

    # -- Trainer's seams --

    def train(
        self, resume_from_checkpoint: str | bool | None, stock: Callable[..., TrainOutput]
    ) -> TrainOutput:
        """Train. Args: stock: takes the checkpoint."""
        trainer, clock = self._trainer, Clock()
        with clock.part(TRAINING_TIME):
            if self.tuner.undecided:
                self._choose(resume_from_checkpoint, clock)
            try:
                output = stock(resume_from_checkpoint)
            finally:
                if trainer.state.global_step:
                    note_training(trainer.model, Path(trainer.folder))
        if trainer.is_world_process_zero() and not resume_from_checkpoint:
            clock.write()
        return output

    def step(self, model: nn.Module, inputs: Any, stock: Callable[[], Tensor]) -> Tensor:
        """Make the gradient of one optimizer step."""
        if self._run is not None:
            self.tuner.before_step(self._run, self._trainer.state.global_step)
        with each_row_read_as_alone(self._trainer.model):
            return stock()

    def prepare(self, max_steps: int, stock: Callable[[], Prepared]) -> Prepared:
        """Prepare model, loader and optimizer for the steps up to ``max_steps``."""
        return stock()

    def _as_trainer(self, stock: Callable[[], Any]) -> Any:
        """Do what Trainer does."""
        return stock()

    loader = operations = batch_size = gradient_norm = search = _as_trainer

    def log(self, logs: dict[str, float], stock: Callable[[dict[str, float]], None]) -> None:
        """Log. Args: stock: takes what is logged."""
        stock(logs)

    def save(self, folder: str, stock: Callable[[], None]) -> None:
        """Save the weights, and what belongs beside them."""
        refuse_foreign(Path(folder), None)
        stock()
        if not self.args.should_save:
            return
        if self._run is not None:
            self.tuner.save(folder)
        if self._trainer.state.global_step:
            stamp_without_privacy(folder)

    def write_card(self, options: Mapping[str, object], stock: Callable[[], None]) -> None:
        """Write the card. Args: options: of ``create_model_card``, by name."""
        stock()

    # -- what only a private run has --

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer that takes the place of one that was just made."""
        return optimizer

    def evaluates(self, evaluation: DataSet) -> None:
        """Note that rows are evaluated on, one data set or several by name."""

    def words(self) -> dict[str, object]:
        """Return what the features add to the card's table of settings."""
        return {}

    def no_plan(self, *args: Any, **kwargs: Any) -> Any:
        """Raise UnsupportedArgumentError: there is no private run."""
        raise no_plan()

    sync = statement = no_plan


def loaded(model: str | nn.Module | None) -> nn.Module | None:
    """Return a model that may be given by its name, and may be read from a GGUF file."""
    return dequantized(load_model(model) if isinstance(model, str) else model)


def no_plan() -> UnsupportedArgumentError:
    """Return the error of a trainer that has no private run."""
    return UnsupportedArgumentError(
        "There is no privacy plan: privacy_mode is 'non_private' or the trainer has no "
        "train_dataset."
    )
