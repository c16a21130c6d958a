"""``hf-dp train --config FILE``: run a task's training in this process."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hf_dp.cli.config import read_yaml
from hf_dp.cli.help_text import add_fields, add_privacy, formatter, list_tasks
from hf_dp.cli.options import common_parser
from hf_dp.cli.tasks import DEFAULT_TASK, TASKS, training_module

DESCRIPTION = """\
Fine-tune a model, with differential privacy unless privacy_mode is non_private. Every argument can
stand in the YAML file or on the command line (--learning_rate or --learning-rate). The command line
wins. An unknown key is an error.

A private run that gets SIGTERM or SIGINT (Ctrl-C) finishes its step, saves a checkpoint and ends
with the exit code 128 + signal number (143, 130); go on with --resume_from_checkpoint True.

"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the options that decide which task runs."""
    parser = common_parser("hf-dp train")
    parser.add_argument(
        "--help-all",
        "--help_all",
        action="store_true",
        help="list every argument, those of TrainingArguments included (slow: imports "
        "transformers)",
    )
    return parser


def help_text(task: str) -> str:
    """Return the help of ``hf-dp train`` with the arguments of one task."""
    module = training_module(task)
    parser = argparse.ArgumentParser(
        "hf-dp train",
        usage="hf-dp train --config FILE [--NAME VALUE ...]",
        description=DESCRIPTION + list_tasks(TASKS),
        epilog=f"example:\n  {module.EXAMPLE}",
        formatter_class=formatter,
        parents=[build_parser()],
        add_help=False,
    )
    for cls in module.ARGUMENTS:
        add_fields(parser, cls)
    training = parser.add_argument_group("training").add_argument
    training("--output_dir", metavar="FOLDER", help="where the checkpoint is written")
    if TASKS[task].private:
        add_privacy(parser)
    return parser.format_help()


def main(argv: Sequence[str]) -> int:
    """Find the task (``--task``, else the YAML file's ``task:``) and run it."""
    args, words = build_parser().parse_known_args(list(argv))
    values = {} if args.config is None else read_yaml(args.config)
    task = args.task or values.get("task", DEFAULT_TASK)
    if args.help or not argv:
        print(help_text(task))
        return 0 if argv else 2
    return training_module(task).train(values, ["--help"] if args.help_all else words)
