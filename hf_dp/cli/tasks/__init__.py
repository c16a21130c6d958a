"""The registry of tasks: one row for each task that the command line knows; and what the private
ones share, the way from a configuration to a trainer and its results.

To add a task, write a module with a :class:`PrivateTask`, or with the names of :class:`TaskModule`
where it is not private, and add a row to TASKS. The module is imported also by ``--help``, so
import heavy things inside its functions.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from hf_dp._arguments import argument
from hf_dp._validate import integer, one_of
from hf_dp.cli import config
from hf_dp.cli.config import DEFAULT_TASK, Recipe
from hf_dp.cli.launch import add_launch_options
from hf_dp.cli.options import Parser, check_names, given_options
from hf_dp.errors import ConfigError
from hf_dp.tasks.models import freeze, turn_off_dropout, warn_of_new_weights

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel

    from hf_dp.tasks.models import StartArguments
    from hf_dp.tasks.sources import SourceArguments
    from hf_dp.trainer.arguments import DPTrainingArguments
    from hf_dp.trainer.trainer import DPTrainer

Evaluate = Callable[[], list[str]]
# As many first steps as Li et al. average over (figure 3, right).
SIGNAL_STEPS = 30
# What stands beside the metrics of the evaluation rows, and is no score.
SIGNALS = ("signal_to_noise", "measured_signal_to_noise")


class TaskModule(Protocol):
    """What trains a task, for the keys of a configuration, and command-line words."""

    ARGUMENTS: Sequence[type]

    def train(self, values: Recipe, words: Sequence[str]) -> int: ...


@dataclass(frozen=True)
class Task:
    """One row of the registry.

    Attributes:
        help: one line for ``hf-dp train --help``.
        module: the name of its module, or of an object in one (``module:name``).
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
        "fine-tune a decoder to generate text: from tables, dialog, chat, free text",
        "hf_dp.cli.tasks.generation:CAUSAL",
        "hf-dp train --config recipes/e2e/gpt2_full_eps8.yaml --train_file train.parquet \\\n"
        "      --validation_file test.parquet",
    ),
    "seq2seq": Task(
        "fine-tune an encoder-decoder to generate text",
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
    return cast(PrivateTask, training_module(one_of("task", name, private_tasks())))


def check_recipe(values: Recipe) -> None:
    """Raise ConfigError for keys of a recipe that its task does not have."""
    config.check_early(values, (), training_module(values.get("task", DEFAULT_TASK)).ARGUMENTS)


def read_recipe(parser: Parser, argv: Sequence[str]) -> tuple[argparse.Namespace, Recipe, Recipe]:
    """Return a command's own options, and the keys of its recipe: those of its file, replaced by
    other options, as `hf-dp train` takes them; and these options alone. Nothing is left of what
    has no value, and of how processes are started.

    Raises: ConfigError for names that neither the command nor the recipe's task has.
    """
    gone, argv = config.nulls(argv)
    own, words = parser.parse_known_args(argv)
    launching = Parser(parser.prog, add_help=False)
    add_launch_options(launching)
    _, words = launching.parse_known_args(words)
    values = {} if own.config is None else config.read_yaml(own.config)
    task = given_options(words).get("task") or values.get("task", DEFAULT_TASK)
    hints = config.hints_of((*training_module(task).ARGUMENTS, *config.PRIVACY))
    known = {*hints, *config.training_arguments(), "task"}
    options: Recipe = {}
    for name, value in config.as_keys(words, hints).items():
        without = name.removeprefix("no_")
        if value is True and name not in known and without in known:
            name, value = without, False
        options[name] = value
    check_names([*options, *gone], {*known, *parser.names()}, "option")
    values |= options | gone
    check_recipe({name: value for name, value in values.items() if name not in gone})
    found = config.fitted(values, hints)
    return own, {name: value for name, value in found.items() if value is not None}, options


# -- what the private tasks share ---


@dataclass
class EvalArguments:
    """How the evaluation runs."""

    trained: str | None = argument(
        None,
        "The model to evaluate, a folder or Hub name. Default: the configuration's output_dir.",
    )
    per_device_eval_batch_size: int = argument(8, "Rows at a time.")
    use_cpu: bool = argument(False, "Leave a GPU alone.")

    def __post_init__(self) -> None:
        integer("per_device_eval_batch_size", self.per_device_eval_batch_size, 1)

    def place(self, values: Recipe) -> str | None:
        """Return where what is evaluated lies. Raises: ConfigError where nothing was trained."""
        folder = values.get("output_dir")
        if self.trained is None and folder is not None and not Path(folder).is_dir():
            raise ConfigError(
                f"There is no model in {str(folder)!r}, the output_dir of the configuration. Train "
                "it first (hf-dp train), or give its folder or Hub name: --trained NAME."
            )
        return self.trained or folder


def parse_evaluation(
    kinds: Sequence[type], values: Recipe, words: Sequence[str], prog: str = "hf-dp eval"
) -> tuple[Any, ...]:
    """Return instances of dataclasses; leave out the keys that only concern training."""
    ours = {item.name for kind in kinds for item in dataclasses.fields(kind)}
    config.check_names(
        values, {*ours, *config.training_arguments(), *config.BLOCKS}, "configuration key"
    )
    return config.parse(kinds, {k: v for k, v in values.items() if k in ours}, words, prog=prog)


class PrivateTask(ABC):
    """A task that trains privately, as ``hf-dp train`` and ``hf-dp eval`` know it.

    Attributes:
        ARGUMENTS: the dataclasses of its own arguments; the first is that of its model.
        build_trainer: makes, of instances of these, the training arguments and the adapter, the
            trainer, and what evaluates its model: a function that notes the metrics in the trainer
            and returns them as lines to read.
    """

    ARGUMENTS: Sequence[type]
    build_trainer: Callable[..., tuple[DPTrainer, Evaluate]]

    @abstractmethod
    def evaluate(
        self, values: Recipe, words: Sequence[str], *, zero_shot: bool
    ) -> tuple[dict[str, float], list[str]]:
        """Return the metrics, by name and as lines, of what was trained, or of its base."""

    def train(self, values: Recipe, words: Sequence[str]) -> int:
        """Train, evaluate and save; print metrics, epsilon, and last the output folder."""
        trainer, evaluate = self._configured(values, words)
        private, first = trainer.args.is_private, trainer.is_world_process_zero()
        if private and first:
            print(f"\n{_planned(trainer)}", file=sys.stderr)
        trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
        try:
            lines = evaluate()
        finally:  # what was trained is kept, whatever becomes of the scores
            trainer.save_model()  # and with push_to_hub also publish it
        found = {**trainer.evaluation_metrics(), **signal_to_noise(trainer.state.log_history)}
        trainer.save_metrics("eval", found, combined=False)
        trainer.save_state()  # the log; it is never published
        if first:
            said = [trainer.privacy_statement(), _next(trainer)] if private else []
            print("", *lines, *said, trainer.args.output_dir, sep="\n")
        # Otherwise a process of several may abort at its exit; Trainer.end() does no more.
        trainer.accelerator.end_training()
        return 0

    def trainer_of(self, values: Recipe, words: Sequence[str]) -> DPTrainer:
        """Return the trainer of a configuration."""
        return self._configured(values, words)[0]

    def _configured(self, values: Recipe, words: Sequence[str]) -> tuple[DPTrainer, Evaluate]:
        from hf_dp.trainer.arguments import DPTrainingArguments

        kinds = [*self.ARGUMENTS, DPTrainingArguments]
        *own, args = config.parse(kinds, values, words, prog="hf-dp train")
        card, adapter = (
            config.card_block(values.get("card")),
            config.peft_config(values.get("peft")),
        )
        if own[0].from_scratch and adapter is not None:
            raise ConfigError(
                "`from_scratch` cannot be combined with `peft`: the random base would not be "
                "saved. Leave one of them out."
            )
        trainer, evaluate = self.build_trainer(*own, args, adapter)
        if args.is_private:
            trainer.describe(**card)
        return trainer, evaluate


def _planned(trainer: DPTrainer) -> str:
    """Return what a private run will do, in public numbers."""
    plan = trainer.privacy_plan
    assert plan is not None
    words = plan.words
    ran = plan.mechanism.draw.what_ran(plan, plan.steps, words.name, words.drawn)
    return (
        f"{ran}. A step draws about {plan.expected_batch_size:g} of {plan.drawn_from:,}; noise "
        f"multiplier {plan.noise_multiplier:.4g}. Checks come before the first step."
    )


def _next(trainer: DPTrainer) -> str:
    """Return where the card of a private run is, and what its user may do next."""
    folder = trainer.args.output_dir
    return (
        f"Card: {folder}/README.md\nWhat would be published: hf-dp inspect {folder}\n"
        f"Publish: hf-dp publish {folder} YOU/MODEL --private"
    )


def prepare(
    model: PreTrainedModel,
    model_args: StartArguments,
    args: DPTrainingArguments,
    adapter: PeftConfig | None,
    length: int | None = None,
) -> None:
    """Freeze what the configuration names, and turn its dropout off; ``length`` is that of the
    longest example of texts, in tokens."""
    freeze(model, model_args.freeze)
    turn_off_dropout(model, model_args.without_dropout)
    if adapter is not None:
        warn_of_new_weights(model)
    if args.auto_physical_batch_size and args.auto_physical_batch_length is None:
        args.auto_physical_batch_length = length


def describe_sources(trainer: DPTrainer, model_args: StartArguments, data: SourceArguments) -> None:
    """Note, for the card, the training data and the base; and, in the configuration of what is
    trained without privacy, its data, for the cards of private runs that start from it."""
    base = None if model_args.from_scratch else model_args.model_name_or_path
    trainer.card.update(dataset=(named := data.public_name), base_model=base)
    if not trainer.args.is_private and named:
        config = trainer.model.config
        seen = getattr(config, "pretraining_sources", None) or []
        config.pretraining_sources = list(dict.fromkeys([*seen, named]))


def metric_lines(
    metrics: Mapping[str, float], evaluation: Any, names: Sequence[str] = ("accuracy", "f1")
) -> list[str]:
    """Return ``accuracy on the 872 evaluation rows: 0.9`` for each metric of each set."""
    sets = evaluation if isinstance(evaluation, Mapping) else {"": evaluation}
    lines = []
    for name, rows in sets.items():
        words = f"{name} " if name else ""
        for metric in names:
            key = f"eval_{name}_{metric}" if name else f"eval_{metric}"
            if key in metrics:
                lines.append(
                    f"{metric} on the {len(rows)} {words}evaluation rows: {metrics[key]:.4f}"
                )
    return lines


def signal_to_noise(logs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each signal to noise in the logs of the first 30 steps."""
    means = {}
    for name in SIGNALS:
        found = [log[name] for log in logs if name in log and log.get("step", 0) <= SIGNAL_STEPS]
        if found:
            means[name] = sum(found) / len(found)
    return means
