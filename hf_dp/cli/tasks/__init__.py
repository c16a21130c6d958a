"""The registry of tasks: one row for each task that the command line knows.

To add a task, write a module with the names of :class:`TaskModule` and add a row to TASKS.
``hf-dp train``, ``hf-dp eval`` and their ``--help`` read the row. The module is imported only when
its task is asked for, also by ``--help``, so import heavy things inside its functions.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from hf_dp._validate import one_of


class TaskModule(Protocol):
    """What the module of a task provides for ``hf-dp train``.

    Attributes:
        ARGUMENTS: the dataclasses of the task's own arguments, which ``--help`` lists.
        EXAMPLE: a command that trains, for ``--help``.
    """

    ARGUMENTS: Sequence[type]
    EXAMPLE: str

    def train(self, values: dict[str, Any], words: Sequence[str]) -> int:
        """Run the task for the keys of a configuration file and command-line words."""
        ...


class PrivateTaskModule(TaskModule, Protocol):
    """What the module of a private task provides, in addition to :class:`TaskModule`."""

    def trainer_of(self, values: dict[str, Any], words: Sequence[str]) -> Any:
        """Return the task's :class:`DPTrainer` for the keys of a configuration file and
        command-line words."""
        ...


class EvaluationModule(Protocol):
    """What the module of a task provides for ``hf-dp eval``.

    Attributes:
        ARGUMENTS: the dataclasses of the arguments, which ``--help`` lists.
        EXAMPLE: a command that evaluates, for ``--help``.
    """

    ARGUMENTS: Sequence[type]
    EXAMPLE: str

    def evaluate(
        self, values: dict[str, Any], words: Sequence[str], *, task: str, zero_shot: bool
    ) -> tuple[dict[str, float], list[str]]:
        """Return the metrics by the Trainer's names, and as lines to read."""
        ...


@dataclass(frozen=True)
class Task:
    """One row of the registry.

    Attributes:
        help: one line for ``hf-dp train --help``.
        training: the name of a :class:`TaskModule`.
        evaluation: the name of an :class:`EvaluationModule`, or None if ``hf-dp eval`` does not
            know the task.
        private: whether the task trains with differential privacy, so that the privacy arguments
            apply.
        one_process: whether the task cannot be divided among processes.
    """

    help: str
    training: str
    evaluation: str | None = None
    private: bool = True
    one_process: bool = False


DEFAULT_TASK = "text_classification"
TASKS: dict[str, Task] = {
    "text_classification": Task(
        "fine-tune an encoder to classify texts",
        "hf_dp.cli.tasks.text_classification",
        evaluation="hf_dp.cli.tasks.text_classification_evaluation",
    ),
    "image_classification": Task(
        "fine-tune a vision transformer to classify images",
        "hf_dp.cli.tasks.image_classification",
        evaluation="hf_dp.cli.tasks.image_classification_evaluation",
    ),
    "causal_lm": Task(
        "fine-tune a decoder to write: tables to text, dialog, chat, free text",
        "hf_dp.cli.tasks.causal_lm",
        evaluation="hf_dp.cli.tasks.generation_evaluation",
    ),
    "seq2seq": Task(
        "fine-tune an encoder-decoder to write",
        "hf_dp.cli.tasks.seq2seq",
        evaluation="hf_dp.cli.tasks.generation_evaluation",
    ),
    "masked_lm": Task(
        "continue pretraining a masked language model on public text; not private",
        "hf_dp.cli.tasks.masked_lm",
        private=False,
        one_process=True,  # it stops by its own processor time, which processes do not share
    ),
}


def evaluated_tasks() -> list[str]:
    """Return the names of the tasks that ``hf-dp eval`` knows."""
    return [name for name, task in TASKS.items() if task.evaluation is not None]


def training_module(name: str) -> TaskModule:
    """Import the module that trains a task. Raises: InvalidArgumentError for an unknown name."""
    return cast(TaskModule, importlib.import_module(TASKS[one_of("task", name, TASKS)].training))


def private_module(name: str) -> PrivateTaskModule:
    """Import the module of a task that trains privately.

    Raises: InvalidArgumentError for an unknown name, or for a task that does not.
    """
    private = [known for known, task in TASKS.items() if task.private]
    return cast(PrivateTaskModule, training_module(one_of("task", name, private)))


def evaluation_module(name: str) -> EvaluationModule:
    """Import the module that evaluates a task.

    Raises: InvalidArgumentError for an unknown name, or for a task without evaluation.
    """
    module = TASKS[one_of("task", name, evaluated_tasks())].evaluation
    assert module is not None
    return cast(EvaluationModule, importlib.import_module(module))
