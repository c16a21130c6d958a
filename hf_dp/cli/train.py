"""``hf-dp train --config FILE``: run a task's training, in this process or in several."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_dp.cli.argument_groups import PRIVACY
from hf_dp.cli.config import check_early, read_yaml
from hf_dp.cli.launch import (
    add_launch_options,
    launch,
    launch_words,
    refuse_several,
    show_progress_once,
)
from hf_dp.cli.non_private import as_asked
from hf_dp.cli.options import command_parser, common_parser, list_tasks
from hf_dp.cli.tasks import DEFAULT_TASK, TASKS, training_module
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


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the options that decide which task runs."""
    parser = common_parser("hf-dp train")
    parser.add_argument(
        "--help-all",
        action="store_true",
        help="list every argument, those of TrainingArguments included (slow: imports "
        "transformers)",
    )
    add_launch_options(parser)
    return parser


def help_text(task: str) -> str:
    """Return the help of ``hf-dp train`` with the arguments of one task."""
    module = training_module(task)
    parser = command_parser(
        "hf-dp train",
        "hf-dp train --config FILE [--NAME VALUE ...]",
        DESCRIPTION + list_tasks(TASKS),
        f"example:\n  {module.EXAMPLE}",
        build_parser(),
        (*module.ARGUMENTS, *(PRIVACY if TASKS[task].private else ())),
    )
    training = parser.add_argument_group("training").add_argument
    training("--output_dir", metavar="FOLDER", help="where the checkpoint is written")
    return parser.format_help()


def main(argv: Sequence[str]) -> int:
    """Find the task (``--task``, else the YAML file's ``task:``) and run it.

    Raises: HfDpError for arguments, a configuration or a task that cannot run like this.
    """
    args, words = build_parser().parse_known_args(list(argv))
    values = {} if args.config is None else read_yaml(args.config)
    task = args.task or values.get("task", DEFAULT_TASK)
    if args.help or not argv:
        print(help_text(task))
        return 0 if argv else 2
    module = training_module(task)
    if args.help_all:
        return module.train(values, ["--help"])
    if TASKS[task].one_process:
        refuse_several(f"hf-dp train --task {task}", "Start it without a launcher.")
        if launch_words(args):
            raise ConfigError(
                f"The task {task!r} runs in one process. Leave `--num_processes` and "
                "`--accelerate_config` out."
            )
    check_early(values, words, module.ARGUMENTS)
    if not launch_words(args):
        show_progress_once()
        if TASKS[task].private:
            values = as_asked(values, words)
        return module.train(with_recipe({**values, "task": task}, args.config), words)
    named = {"--config": args.config, "--task": args.task}
    chosen = [word for name, value in named.items() if value is not None for word in (name, value)]
    return launch("train", [*chosen, *words], args)


def with_recipe(values: dict[str, Any], path: str | None) -> dict[str, Any]:
    """Return the values of a recipe whose card names its file, unless the card says another."""
    card = values.get("card") or {}
    task = TASKS.get(values.get("task", DEFAULT_TASK))
    if path is None or task is None or not task.private or not isinstance(card, dict):
        return values
    return {**values, "card": {"recipe": Path(path).name, **card}}
