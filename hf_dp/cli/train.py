"""``hf-dp train --config FILE``: run a task's training, in this process or in several."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from hf_dp.cli.config import DEFAULT_TASK, PRIVACY, CommandParser, Recipe, check_early
from hf_dp.cli.launch import (
    add_launch_options,
    launch,
    launch_words,
    refuse_several,
    show_progress_once,
)
from hf_dp.cli.non_private import as_asked
from hf_dp.cli.tasks import TASKS, list_tasks, training_module
from hf_dp.errors import ConfigError

DESCRIPTION = """\
Fine-tune a model, with differential privacy unless privacy_mode is non_private. Every argument can
stand in the YAML file or on the command line (--learning_rate or --learning-rate). The command line
wins. An unknown key is an error.

With --privacy_mode non_private on the command line, a private recipe trains as its own baseline:
keys of the file that only a private run reads are left out (each is named), the batch stays as
large, and the output folder gets the ending _non_private. The learning rate stays the recipe's,
and without privacy a smaller one is often better.

A private run that gets SIGTERM or SIGINT (Ctrl-C) finishes its step, saves a checkpoint and ends
with the exit code 128 + signal number (143, 130); go on with --resume_from_checkpoint True.

"""


def main(argv: Sequence[str]) -> int:
    """Find the task (``--task``, else the YAML file's ``task:``) and run it."""
    parser = CommandParser("hf-dp train", "--config FILE [--NAME VALUE ...]")
    parser.add_task()
    parser.option("--output_dir", "where the checkpoint is written", "FOLDER")
    parser.switch("--help-all", "list every argument, those of TrainingArguments included (slow)")
    add_launch_options(parser)
    args, values, words = parser.read(argv, _described)
    task = values["task"]
    module = training_module(task)
    if args.help_all:
        return module.train(values, ["--help"])
    if args.output_dir is not None:
        words = [*words, "--output_dir", args.output_dir]
    if TASKS[task].one_process:
        refuse_several(f"hf-dp train --task {task}")
        if launch_words(args):
            raise ConfigError(
                f"The task {task!r} runs in one process. Leave `--num_processes` and "
                "`--accelerate_config` out."
            )
    check_early(values, words, module.ARGUMENTS)
    if launch_words(args):
        named = {"--config": args.config, "--task": args.task}
        chosen = [(name, value) for name, value in named.items() if value is not None]
        return launch("train", [*itertools.chain(*chosen), *words], args)
    show_progress_once()
    if TASKS[task].private:
        values = as_asked(values, words)
    return module.train(with_recipe(values, args.config), words)


def _described(task: str) -> tuple[str, str, Sequence[type]]:
    module = training_module(task)
    arguments = (*module.ARGUMENTS, *(PRIVACY if TASKS[task].private else ()))
    return DESCRIPTION + list_tasks(TASKS), f"example:\n  {TASKS[task].example}", arguments


def with_recipe(values: Recipe, path: str | None) -> Recipe:
    """Return the values of a recipe whose card names its file, unless the card says another."""
    card = values.get("card") or {}
    task = TASKS.get(values.get("task", DEFAULT_TASK))
    if path is None or task is None or not task.private or not isinstance(card, dict):
        return values
    return {**values, "card": {"recipe": Path(path).name, **card}}
