"""``hf-dp eval``: the metrics of a trained model, or of its base before any training."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from hf_dp._validate import one_of
from hf_dp.cli.config import check_early, read_yaml
from hf_dp.cli.launch import refuse_several
from hf_dp.cli.non_private import NON_PRIVATE, folder_of
from hf_dp.cli.options import command_parser, common_parser, list_tasks
from hf_dp.cli.tasks import DEFAULT_TASK, evaluated_tasks, evaluation_module

DESCRIPTION = """\
Print the metrics of a model on evaluation rows, one a line. The configuration is that of its
training; keys that only concern training are ignored. The arguments of model and data can stand on
the command line.

"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the options that are not those of a task."""
    parser = common_parser("hf-dp eval")
    add = parser.add_argument
    add(
        "--zero-shot",
        action="store_true",
        help="evaluate the untrained base, before anything is spent; a classifier needs "
        "`infilling`: how well its template and label words fit (Li et al., figure 8)",
    )
    add(
        "--privacy-mode",
        metavar="NAME",
        help="as in `hf-dp train`: non_private evaluates what the recipe wrote with it",
    )
    add("--json", action="store_true", help='print one JSON object: {"eval_accuracy": ...}')
    return parser


def help_text(task: str) -> str:
    """Return the help of ``hf-dp eval`` with the arguments of one task."""
    module = evaluation_module(task)
    parser = command_parser(
        "hf-dp eval",
        "hf-dp eval --config FILE [--zero-shot] [--NAME VALUE ...]",
        DESCRIPTION + list_tasks(evaluated_tasks()),
        f"example:\n  {module.EXAMPLE}",
        build_parser(),
        module.ARGUMENTS,
    )
    return parser.format_help()


def main(argv: Sequence[str]) -> int:
    """Print one line a metric; return 2 (with a line on stderr) for what cannot be evaluated."""
    args, words = build_parser().parse_known_args(list(argv))
    values = {} if args.config is None else read_yaml(args.config)
    task = args.task or values.get("task", DEFAULT_TASK)
    if args.help or not argv:
        print(help_text(task))
        return 0 if argv else 2
    module = evaluation_module(task)
    check_early(values, words, module.ARGUMENTS, training=False)
    refuse_several("hf-dp eval", "Start it without a launcher.")
    if args.privacy_mode is not None:
        from hf_dp.trainer.from_arguments import MODES

        one_of("privacy_mode", args.privacy_mode, (NON_PRIVATE, *MODES))
    if args.privacy_mode == NON_PRIVATE:
        values = {**values, "privacy_mode": NON_PRIVATE, "output_dir": folder_of(values)}
    metrics, lines = module.evaluate(values, words, task=task, zero_shot=args.zero_shot)
    print(json.dumps(metrics) if args.json else "\n".join(lines))
    return 0
