"""``hf-dp train`` and ``hf-dp eval``: run a task's training, in this process or in several, and the
metrics of what it trained, or of its base before any training."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path

from hf_dp._validate import one_of
from hf_dp.cli import config, tasks
from hf_dp.cli.config import DEFAULT_TASK, NON_PRIVATE, CommandParser, Recipe
from hf_dp.cli.launch import add_launch_options, launch, launch_words, refuse_several
from hf_dp.cli.tasks import TASKS, EvalArguments, training_module
from hf_dp.errors import ConfigError

DESCRIPTION = """\
Fine-tune a model, with differential privacy unless privacy_mode is non_private. Every argument can
stand in the YAML file or on the command line (--learning_rate or --learning-rate). The command line
wins. An unknown key is an error.

Two blocks stand in the file alone: `peft: {peft_type: lora, r: 8}` says what trains (everything
where it is missing), with the options of PEFT's configuration of that type; `card: {license: mit}`
says what the model card cannot know.

With --privacy_mode non_private on the command line, a private recipe trains as its own baseline:
keys of the file that only a private run reads are left out (each is named), the batch stays as
large, and the output folder gets the ending _non_private. The learning rate stays the recipe's,
and without privacy a smaller one is often better.

A private run that gets SIGTERM or SIGINT (Ctrl-C) finishes its step, saves a checkpoint and ends
with the exit code 128 + signal number (143, 130); go on with --resume_from_checkpoint True.

"""
EVALUATION = """\
Print the metrics of a model on evaluation rows, one a line. The configuration is that of its
training; keys that only concern training are ignored. The arguments of model and data can stand on
the command line.

"""
EVAL_EXAMPLE = """\
example:
  hf-dp eval --config recipes/glue/sst2/roberta_base_infilling_eps3.yaml --zero-shot
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
    config.check_early(values, words, module.ARGUMENTS)
    if launch_words(args):
        named = {"--config": args.config, "--task": args.task}
        chosen = [(name, value) for name, value in named.items() if value is not None]
        return launch("train", [*itertools.chain(*chosen), *words], args)
    _show_progress_once()
    if TASKS[task].private:
        values = config.as_asked(values, words)
    return module.train(with_recipe(values, args.config), words)


def _show_progress_once() -> None:
    """Hide the progress bars of data sets and models in all processes but the main one."""
    if int(os.environ.get("RANK") or 0) > 0:
        import datasets
        from transformers.utils import logging

        datasets.disable_progress_bars()
        logging.disable_progress_bar()


def _described(task: str) -> tuple[str, str, Sequence[type]]:
    module = training_module(task)
    arguments = (*module.ARGUMENTS, *(config.PRIVACY if TASKS[task].private else ()))
    return DESCRIPTION + tasks.list_tasks(TASKS), f"example:\n  {TASKS[task].example}", arguments


def with_recipe(values: Recipe, path: str | None) -> Recipe:
    """Return the values of a recipe whose card names its file, unless the card says another."""
    card = values.get("card") or {}
    task = TASKS.get(values.get("task", DEFAULT_TASK))
    if path is None or task is None or not task.private or not isinstance(card, dict):
        return values
    return {**values, "card": {"recipe": Path(path).name, **card}}


def evaluate(argv: Sequence[str]) -> int:
    """Print one line a metric; return 2 (with a line on stderr) for what cannot be evaluated."""
    parser = CommandParser("hf-dp eval", "--config FILE [--zero-shot] [--NAME VALUE ...]")
    parser.add_task()
    parser.switch(
        "--zero-shot",
        "evaluate the untrained base, before anything is spent; a classifier needs `infilling`, "
        "and this shows how well its template and label words fit (Li et al., figure 8)",
    )
    mode = "as in `hf-dp train`: non_private evaluates the model that the recipe trained with it"
    parser.option("--privacy-mode", mode, "NAME")
    parser.switch("--json", 'print one JSON object: {"eval_accuracy": ...}')
    args, values, words = parser.read(argv, _eval_described)
    module = tasks.private_task(values["task"])
    config.check_early(values, words, (EvalArguments, *module.ARGUMENTS), training=False)
    refuse_several("hf-dp eval")
    if args.privacy_mode is not None:
        from hf_dp.trainer.privacy_arguments import MODES

        one_of("privacy_mode", args.privacy_mode, (NON_PRIVATE, *MODES))
    if args.privacy_mode == NON_PRIVATE:
        values |= {"output_dir": config.folder_of(values), "privacy_mode": NON_PRIVATE}
    metrics, lines = module.evaluate(values, words, zero_shot=args.zero_shot)
    print(json.dumps(metrics) if args.json else "\n".join(lines))
    return 0


def _eval_described(task: str) -> tuple[str, str, Sequence[type]]:
    arguments = (EvalArguments, *tasks.private_task(task).ARGUMENTS)
    return EVALUATION + tasks.list_tasks(tasks.private_tasks()), EVAL_EXAMPLE, arguments
