"""``hf-dp eval``: the metrics of a trained model, or of its base before any training."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hf_dp._validate import one_of
from hf_dp.cli.config import CommandParser, check_early
from hf_dp.cli.launch import refuse_several
from hf_dp.cli.non_private import NON_PRIVATE, folder_of
from hf_dp.cli.tasks import list_tasks, private_task, private_tasks
from hf_dp.cli.tasks.shared import EvalArguments

DESCRIPTION = """\
Print the metrics of a model on evaluation rows, one a line. The configuration is that of its
training; keys that only concern training are ignored. The arguments of model and data can stand on
the command line.

"""
EXAMPLE = """\
example:
  hf-dp eval --config recipes/glue/sst2/roberta_base_infilling_eps3.yaml --zero-shot
"""


def main(argv: Sequence[str]) -> int:
    """Print one line a metric; return 2 (with a line on stderr) for what cannot be evaluated."""
    parser = CommandParser("hf-dp eval", "--config FILE [--zero-shot] [--NAME VALUE ...]")
    parser.add_task()
    parser.switch(
        "--zero-shot",
        "evaluate the untrained base, before anything is spent; a classifier needs `infilling`: "
        "how well its template and label words fit (Li et al., figure 8)",
    )
    mode = "as in `hf-dp train`: non_private evaluates what the recipe wrote with it"
    parser.option("--privacy-mode", mode, "NAME")
    parser.switch("--json", 'print one JSON object: {"eval_accuracy": ...}')
    args, values, words = parser.read(argv, _described)
    module = private_task(values["task"])
    check_early(values, words, (EvalArguments, *module.ARGUMENTS), training=False)
    refuse_several("hf-dp eval")
    if args.privacy_mode is not None:
        from hf_dp.trainer.privacy_arguments import MODES

        one_of("privacy_mode", args.privacy_mode, (NON_PRIVATE, *MODES))
    if args.privacy_mode == NON_PRIVATE:
        values |= {"output_dir": folder_of(values), "privacy_mode": NON_PRIVATE}
    metrics, lines = module.evaluate(values, words, zero_shot=args.zero_shot)
    print(json.dumps(metrics) if args.json else "\n".join(lines))
    return 0


def _described(task: str) -> tuple[str, str, Sequence[type]]:
    arguments = (EvalArguments, *private_task(task).ARGUMENTS)
    return DESCRIPTION + list_tasks(private_tasks()), EXAMPLE, arguments
