"""``hf-dp <command> ...``: the table of commands.

To add a command, write ``hf_dp/cli/<name>.py`` with ``main(argv: Sequence[str]) -> int``, which
parses the words after its name, prints to stdout and returns the exit code, and add a row to
COMMANDS. Import heavy things after parsing, so that ``--help`` is quick.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from hf_dp._validate import one_of
from hf_dp._version import __version__
from hf_dp.errors import HfDpError

COMMANDS = {
    "train": "fine-tune a model and publish a checkpoint whose card states epsilon",
    "eval": "compute metrics of a model on evaluation rows, trained or zero-shot",
    "generate": "let a private model write synthetic rows, in a file that states its epsilon",
    "sweep": "train over a grid of settings and seeds, and state what the runs cost together",
    "shard": "sort more rows than memory holds by their steps, for a run that streams them",
    "suggest": "suggest batch size, steps, learning rate and what to train, each with its reason",
    "plan": "estimate what a run or a recipe will cost, before anything is spent",
    "account": "compute epsilon of a run, or the noise that a target needs (no torch)",
    "audit": "try to refute a claim: by canaries in one run, or by the exposure of secrets",
    "card": "rewrite the model card of a saved run, with another license, data set, ...",
    "verify": "check what a published model claims against its own evidence",
    "inspect": "list which files of a run would be published, which stay, and why",
    "publish": "put a run on the Hub: weights, tokenizer, configuration, card and ledger",
    "figure": "draw curves and heat maps of what sweep, plan and partitions print with --json",
    "partitions": "list the weight matrices of a model, from which DP-FROST selects",
    "bench": "compare speed and memory of private and non-private training",
}
# Where the functions of commands are that are not `main` of their own module.
PLACES = {"eval": "train.evaluate", "inspect": "publish.inspect"}


def usage() -> str:
    """Return the text of ``hf-dp --help``."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return f"""usage: hf-dp COMMAND ...

Differentially private fine-tuning for Hugging Face.

commands:
{rows}

`hf-dp COMMAND --help` describes one command, `hf-dp --version` prints the version."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 for wrong arguments, as argparse has it, and 141,
    as a shell has it, where nobody reads on (``| head``)."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(words)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
            return 141
        raise  # it was another pipe


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] == "--version":
        print(f"hf-dp {__version__}")
        return 0
    try:
        command = one_of("COMMAND", words[0], COMMANDS)
        module, _, name = PLACES.get(command, f"{command}.main").partition(".")
        run = getattr(importlib.import_module(f"hf_dp.cli.{module}"), name)
        return int(run(words[1:]))
    except HfDpError as error:
        rank = os.environ.get("RANK", "0")  # of several processes, most say what the first says
        who = f"hf-dp {words[0]}" + (f" (rank {rank})" if rank != "0" else "")
        print(f"{who}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
