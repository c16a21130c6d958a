"""What a trainer does at Trainer's seams: one class for each kind of training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from transformers.trainer_utils import TrainOutput

from hf_dp._validate import invalid
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.plans.dp_fp import DP_FP
from hf_dp.run.private_run import PrivateRun
from hf_dp.statement.statement import PrivacyStatement
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.publishing import Publishing
from hf_dp.tuners.apply import apply_peft, load_model
from hf_dp.tuners.base import Tuner
from hf_dp.tuners.find import tuner_for


@dataclass
class Given:
    """What a trainer was given besides its arguments.

    Attributes: trainer_class: the trainer's. dp_trainer: DPTrainer. has_own_loss, has_own_examples:
        whether the class makes its own.
    """

    trainer_class: type
    dp_trainer: type
    has_own_loss: bool
    has_own_examples: bool
    model: Any
    train_dataset: Any
    eval_dataset: Any
    model_init: Any
    compute_loss_func: Any
    peft_config: Any

    def load_model(self) -> None:
        """Load a model that was given by its name."""
        if isinstance(self.model, str):
            self.model = load_model(self.model)


class Training(ABC):
    """One kind of training. ``stock`` is Trainer's own method at a seam, with its arguments.

    Args: args: the trainer's own copy. peft_config: what the user gave.
    """

    is_private: bool

    def __init__(self, args: DPTrainingArguments, peft_config: Any):
        self.args = args
        tuner = tuner_for(peft_config, self.is_private)
        self._wraps = tuner is None and peft_config is not None
        self.tuner = tuner or Tuner()

    def prepare_model(self, given: Given) -> None:
        """Load the model, and wrap it as ``peft_config`` says, where no tuner does.

        Raises: InvalidArgumentError for ``model_init`` with what it cannot serve.
        """
        _refuse_model_init(given.model_init, self.args, given.peft_config)
        given.load_model()
        if self._wraps:
            given.model = apply_peft(
                given.model, given.peft_config, self.args.device, self.args.seed
            )

    def refuse_optimizers(self, trainer: Publishing) -> None:
        """Raise InvalidArgumentError for an optimizer that was made before it is known what
        trains."""
        given = trainer.optimizer is not None or trainer.lr_scheduler is not None
        if self.tuner.undecided and given:
            raise invalid(
                "optimizers",
                type(trainer.optimizer).__name__,
                "to be (None, None) with this peft_config",
                "What trains is chosen when train() starts; set `optim` in the arguments instead.",
            )

    # -- what only a private run has --

    def sync(self) -> PrivateRun:
        """Return the private run, told of the trainer's present model, data and arguments.

        Raises: UnsupportedArgumentError when there is none.
        """
        raise no_plan()

    def statement(self) -> PrivacyStatement:
        """Return what may be said about the run so far. Raises: as :meth:`sync`."""
        raise no_plan()

    def write_beside_weights(self, folder: str) -> None:
        """Write what belongs beside a run's weights. Raises: as :meth:`sync`."""
        raise no_plan()

    def words(self) -> dict[str, Any]:
        """Return what the features add to the card's table of settings."""
        return {}

    # -- Trainer's seams --

    @abstractmethod
    def take(self, given: Given) -> None:
        """Check and prepare what the trainer was given, before Trainer's constructor sees it."""

    @abstractmethod
    def attach(self, trainer: Publishing) -> None:
        """Begin to serve a trainer whose constructor has run. Nothing is written yet."""

    @abstractmethod
    def train(
        self, resume_from_checkpoint: str | bool | None, stock: Callable[..., TrainOutput]
    ) -> TrainOutput:
        """Train. Args: stock: takes the checkpoint."""

    @abstractmethod
    def step(self, model: nn.Module, inputs: Any, stock: Callable[[], Tensor]) -> Tensor:
        """Make the gradient of one optimizer step."""

    @abstractmethod
    def loader(self, stock: Callable[[], DataLoader]) -> DataLoader:
        """Return what the steps take their inputs from."""

    @abstractmethod
    def prepare(self, max_steps: int, stock: Callable[[], Any]) -> Any:
        """Prepare model, loader and optimizer for the steps up to ``max_steps``."""

    @abstractmethod
    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer that takes the place of one that was just made."""

    @abstractmethod
    def operations(self, stock: Callable[[], int]) -> int:
        """Return how many operations a step's inputs cost, as the state adds them up."""

    @abstractmethod
    def batch_size(self, stock: Callable[[], int]) -> int:
        """Return how many examples a step takes."""

    @abstractmethod
    def evaluates(self, evaluation: Any) -> None:
        """Note that rows are evaluated on, one data set or several by name."""

    @abstractmethod
    def search(self, stock: Callable[[], Any]) -> Any:
        """Search hyperparameters."""

    @abstractmethod
    def log(self, logs: dict[str, float], stock: Callable[[dict[str, float]], None]) -> None:
        """Log. Args: stock: takes what is logged."""

    @abstractmethod
    def save(self, folder: str, stock: Callable[[], None]) -> None:
        """Save the weights, and what belongs beside them."""

    @abstractmethod
    def write_card(self, options: Mapping[str, Any], stock: Callable[[], None]) -> None:
        """Write the card. Args: options: of ``create_model_card``, by name."""


def _refuse_model_init(model_init: Any, args: DPTrainingArguments, peft_config: Any) -> None:
    if model_init is not None and args.privacy_mode == DP_FP:
        raise invalid(
            "model_init",
            model_init,
            "to be None with privacy_mode='dp_fp'",
            "The noise is put into one model, and train() would make another. Pass the model.",
        )
    if peft_config is not None and model_init is not None:
        raise invalid(
            "peft_config",
            peft_config,
            "to be None with `model_init`",
            "Wrap the model in model_init.",
        )


def no_plan() -> UnsupportedArgumentError:
    """Return the error of a trainer that has no private run."""
    return UnsupportedArgumentError(
        "There is no privacy plan: privacy_mode is 'non_private' or the trainer has no "
        "train_dataset."
    )
