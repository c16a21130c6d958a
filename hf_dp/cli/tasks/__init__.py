"""The registry of tasks: one row for each task that the command line knows.

To add a task, write a module with a :class:`~hf_dp.cli.tasks.shared.PrivateTask`, or with the names
of :class:`TaskModule` where it is not private, and add a row to TASKS.
``hf-dp train``, ``hf-dp eval`` and their ``--help`` read the row. The module is imported only when
its task is asked for, also by ``--help``, so import heavy things inside its functions.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from hf_dp._validate import one_of
from hf_dp.cli.config import DEFAULT_TASK, Recipe, check_early

if TYPE_CHECKING:
    from hf_dp.cli.tasks.shared import PrivateTask


class TaskModule(Protocol):
    """What the module of a task provides for ``hf-dp train``: the dataclasses of its own arguments,
    which ``--help`` lists, and a function that runs it for the keys of a configuration file, among
    them ``task``, and command-line words."""

    ARGUMENTS: Sequence[type]

    def train(self, values: Recipe, words: Sequence[str]) -> int: ...


@dataclass(frozen=True)
class Task:
    """One row of the registry.

    Attributes:
        help: one line for ``hf-dp train --help``.
        module: the name of its module, or of the object in one (``module:name``).
        example: a command that trains, for ``--help``.
        private: whether it trains with differential privacy, so that the privacy arguments apply.
        one_process: whether it cannot be divided among processes.
    """

    help: str
    module: str
    example: str = "hf-dp train --config FILE"
    private: bool = True
    one_process: bool = False


TASKS: dict[str, Task] = {
    "text_classification": Task(
        "fine-tune an encoder to classify texts",
        "hf_dp.cli.tasks.classification:TEXTS",
        "hf-dp train --config recipes/sst2/minilm_dp_adam_eps3.yaml --train_file train.parquet \\\n"
        "      --validation_file dev.parquet",
    ),
    "image_classification": Task(
        "fine-tune a vision transformer to classify images",
        "hf_dp.cli.tasks.classification:IMAGES",
        "hf-dp train --config recipes/images/small_vit/frost.yaml --train_file train.parquet \\\n"
        "      --validation_file test.parquet",
    ),
    "causal_lm": Task(
        "fine-tune a decoder to write: tables to text, dialog, chat, free text",
        "hf_dp.cli.tasks.generation:CAUSAL",
        "hf-dp train --config recipes/e2e/gpt2_full_eps8.yaml --train_file train.parquet \\\n"
        "      --validation_file test.parquet",
    ),
    "seq2seq": Task(
        "fine-tune an encoder-decoder to write",
        "hf_dp.cli.tasks.generation:SEQ2SEQ",
        "hf-dp train --task seq2seq --model_name_or_path google-t5/t5-small --data_format e2e \\\n"
        "      --train_file train.parquet --validation_file test.parquet --output_dir out \\\n"
        "      --target_epsilon 8 --expected_batch_size 1024 --learning_rate 1e-3",
    ),
    "masked_lm": Task(
        "continue pretraining a masked language model on public text; not private",
        "hf_dp.cli.tasks.masked_lm",
        "hf-dp train --config recipes/pretraining/minilm_masked_lm.yaml --text_files "
        "public.parquet",
        private=False,
        one_process=True,  # it stops by its own processor time, which processes do not share
    ),
}


def list_tasks(names: Iterable[str]) -> str:
    """Return a line for each task, for the help."""
    width = max(map(len, TASKS))
    return "\n".join(["tasks:", *(f"  {name:<{width}}  {TASKS[name].help}" for name in names)])


def private_tasks() -> list[str]:
    """Return the names of the tasks that train privately, and that ``hf-dp eval`` knows."""
    return [name for name, task in TASKS.items() if task.private]


def training_module(name: str) -> TaskModule:
    """Import what trains a task."""
    module, _, part = TASKS[one_of("task", name, TASKS)].module.partition(":")
    found = importlib.import_module(module)
    return cast(TaskModule, getattr(found, part) if part else found)


def private_task(name: str) -> PrivateTask:
    """Import a task that trains privately. Raises: InvalidArgumentError."""
    return cast("PrivateTask", training_module(one_of("task", name, private_tasks())))


def check_recipe(values: Recipe) -> None:
    """Raise ConfigError for keys of a recipe that its task does not have."""
    check_early(values, (), training_module(values.get("task", DEFAULT_TASK)).ARGUMENTS)
