"""A feature: what a run may do besides its steps.

A :class:`Feature` sees what has left the gate, an :class:`Inside` also what is not noised; a
privacy review reads these. A run asks all of them in the order in which they are registered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerState, TrainingArguments

from hf_dp._arguments import Need, Problems
from hf_dp.batches.structure import DataSet
from hf_dp.distributed.processes import Processes
from hf_dp.mechanisms import Mechanism
from hf_dp.overlap import TrainingRows
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.run.gate import Observer
from hf_dp.run.ledger import RunLedger
from hf_dp.run.private_run import PrivateRun
from hf_dp.statement.statement import PrivacyStatement
from hf_dp.tuners.base import Tuner


@dataclass
class Seen:
    """What a feature outside the gate sees of a training: what is public, and what was released.

    Attributes:
        args: the trainer's arguments. plan, book, processes: those of the run.
        statement: returns what may be said about the run so far.
        spent: returns the epsilon so far, under the name that logs have for it.
        tuner: what trains.
        callbacks: of the trainer, features among them.
        state: the trainer's. card: what the user said of the card.
        optimizer, schedule: of the trainer; before training those that the user gave, or None.
        pretraining_sources: public data that the model was pretrained on, as far as it names them.
        trained: how many numbers train, once it is decided.
        noise_norm: as :attr:`hf_dp.mechanisms.Mechanism.noise_norm`, after the last step.
        loss: what Trainer takes for the last step's loss; None: nothing may be known of it.
        noised: as :attr:`hf_dp.mechanisms.Mechanism.noised`, after the last step.
    """

    args: TrainingArguments
    plan: PrivacyPlan
    book: RunLedger
    processes: Processes
    statement: Callable[[], PrivacyStatement]
    spent: Callable[[], dict[str, float]]
    tuner: Tuner
    callbacks: list[TrainerCallback]
    state: TrainerState
    card: Mapping[str, Any]
    optimizer: Optimizer | None = None
    schedule: object = None
    pretraining_sources: Sequence[str] = ()
    trained: int = 0
    noise_norm: float | None = None
    loss: Tensor | None = None
    noised: Mapping[str, Tensor] = field(default_factory=dict)


class Feature(TrainerCallback):
    """What a run may do besides its steps, with what has left the gate. Each moment does nothing.

    One object serves one trainer, which also calls it as one of its callbacks, after all that were
    there before.

    Args: args: the trainer's arguments.

    Attributes:
        names: what :meth:`log` adds.
        asked_for_by: the argument that asks for the feature, by any value but its default; None
            for one that every private run has.
        NEEDS: what the arguments that it reads ask of others.
    """

    names: ClassVar[tuple[str, ...]] = ()
    asked_for_by: ClassVar[str | None] = None
    NEEDS: ClassVar[tuple[Need, ...]] = ()

    def __init__(self, args: Any):
        self.args = args

    @classmethod
    def problems(cls, args: Any, found: Problems) -> None:
        """Note what else is wrong with the arguments that this feature reads."""

    @classmethod
    def is_asked_for(cls, args: object) -> bool:
        """Return whether these arguments ask for the feature. It is not made otherwise."""
        name = cls.asked_for_by
        return name is None or getattr(args, name, None) not in (None, False, [])

    def begin(self, seen: Seen) -> None:
        """Refuse what cannot work. The run was made, and nothing is written."""

    def weaken(self, seen: Seen) -> None:
        """Note what weakens the claim, before steps and before each statement."""

    def optimizer(self, optimizer: Optimizer, seen: Seen) -> Optimizer:
        """Return the optimizer that takes the place of one that the trainer has just made."""
        return optimizer

    def call(self, checkpoint: str | None, seen: Seen) -> None:
        """Refuse a call of ``train()``. Args: checkpoint: the folder from which it goes on."""

    def start(self, seen: Seen) -> None:
        """Say what is to be said before the first step of a call of ``train()``."""

    def released(self, seen: Seen) -> None:
        """Take note of a step's release, which is in :class:`Seen` now."""

    def log(self, logs: dict[str, float], seen: Seen) -> None:
        """Add to what is logged. Names that are not known to be noised were taken out before."""

    def leave(self, seen: Seen) -> None:
        """Take back what was changed outside the run, also after an error."""

    def end(self, seen: Seen) -> None:
        """Say how training ended, when all files are written."""

    def words(self) -> Mapping[str, object]:
        """Return rows for the card's table of settings: name and value."""
        return {}


class Inside(Feature, Observer):
    """A feature that also sees what is not noised, by the moments of :class:`Observer`.

    A statement of a run with one that is not part of hf_dp is "not established".
    """

    run: PrivateRun

    def rows(self, dataset: DataSet, model: nn.Module | None, known: TrainingRows) -> DataSet:
        """Return the training set, perhaps with more rows at its end, before the run is planned.

        Args: known: the rows, as others are compared with them.
        """
        return dataset

    def enter(self, run: PrivateRun, tuner: Tuner) -> None:
        """Keep the run, which was just made, and inside which this feature has its place."""
        self.run = run

    def fit(self, mechanism: Mechanism, optimizer: Optimizer | None) -> None:
        """Adjust sizes that change memory and speed alone, before the steps of a ``train()``."""

    def conclude(self) -> None:
        """Draw conclusions from the whole training, before anything of it is written."""


F = TypeVar("F", bound=type[Feature])
_FEATURES: list[type[Feature]] = []


def register(feature: F) -> F:
    """Make a feature known to each trainer that is made from now on: a class decorator."""
    _FEATURES.append(feature)
    return feature


def features_of(args: object) -> list[Feature]:
    """Return the features that the arguments ask for, in the order in which they are registered."""
    return [each(args) for each in _FEATURES if each.is_asked_for(args)]


def problems_of(args: TrainingArguments, found: Problems) -> None:
    """Note what is wrong with the arguments that features read."""
    for each in _FEATURES:
        for need in each.NEEDS:
            need.note(args, found)
        each.problems(args, found)
