"""``hf-dp <command> ...``: the table of commands.

To add a command, write ``hf_dp/cli/<name>.py`` with one function

    def main(argv: Sequence[str]) -> int

and add a row to COMMANDS. The function parses the words after the command's name with a parser of
its own, prints to stdout and returns the exit code. Its module is imported only when the command is
called, so a heavy import slows no other command. Import heavy things after parsing, so that
``--help`` is quick. :class:`~hf_dp.cli.options.Parser` accepts ``--sample_rate`` for
``--sample-rate``. An :class:`~hf_dp.errors.HfDpError` that escapes becomes
one line on stderr and exit code 2.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from hf_dp._version import __version__
from hf_dp.errors import HfDpError

# command -> (module, one-line help)
COMMANDS: dict[str, tuple[str, str]] = {
    "train": (
        "hf_dp.cli.train",
        "fine-tune a model and publish a checkpoint whose card states epsilon",
    ),
    "eval": (
        "hf_dp.cli.eval",
        "compute metrics of a model on evaluation rows, trained or zero-shot",
    ),
    "generate": (
        "hf_dp.cli.generate",
        "let a private model write synthetic rows; its epsilon stands in the file",
    ),
    "sweep": (
        "hf_dp.cli.sweep",
        "train over a grid of settings and seeds, and state what the runs cost together",
    ),
    "suggest": (
        "hf_dp.cli.suggest",
        "suggest batch size, steps, learning rate and what to train, each with its reason",
    ),
    "plan": (
        "hf_dp.cli.plan",
        "estimate what a run or a recipe will cost, before anything is spent",
    ),
    "account": (
        "hf_dp.cli.account",
        "compute epsilon of a run or a search, or the noise a target needs (no GPU, no torch)",
    ),
    "audit": (
        "hf_dp.cli.audit",
        "try to refute a claim: canaries in or out by coins, or the exposure of secrets",
    ),
    "card": (
        "hf_dp.cli.card",
        "make the model card of a saved run again, with another license, data set, ...",
    ),
    "verify": (
        "hf_dp.cli.verify",
        "check what a published model claims against its own evidence",
    ),
    "inspect": (
        "hf_dp.cli.inspect",
        "list what of a run's folder would be published, what stays, and why",
    ),
    "publish": (
        "hf_dp.cli.publish",
        "put a run on the Hub: weights, tokenizer, configuration, card and ledger",
    ),
    "figure": (
        "hf_dp.cli.figure",
        "draw what sweep, plan and partitions print with --json: curves, bars, heat maps",
    ),
    "partitions": (
        "hf_dp.cli.partitions",
        "list the weight matrices of a model, from which DP-FROST selects",
    ),
    "bench": (
        "hf_dp.cli.bench",
        "measure speed and memory of private training beside non-private training",
    ),
}


def usage() -> str:
    """Return the text of ``hf-dp --help``."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    lines = [
        "usage: hf-dp COMMAND ...",
        "",
        "Differentially private fine-tuning for Hugging Face.",
        "",
        "commands:",
    ]
    end = (
        "`hf-dp COMMAND --help` describes one command, `hf-dp --version` says which hf_dp this is."
    )
    return "\n".join([*lines, *rows, "", end])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 for wrong arguments, as argparse has it."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] == "--version":
        print(f"hf-dp {__version__}")
        return 0
    if words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        print(
            f"hf-dp: unknown command {words[0]!r}. {hint}Known: {', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return 2
    try:
        return int(importlib.import_module(COMMANDS[words[0]][0]).main(words[1:]))
    except HfDpError as error:
        rank = os.environ.get("RANK", "0")  # of several processes, most say what the first says
        who = f"hf-dp {words[0]}" + (f" (rank {rank})" if rank != "0" else "")
        print(f"{who}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
