"""``hf-dp <command> ...``: the table of commands.

To add a command, write ``hf_dp/cli/<name>.py`` with one function

    def main(argv: Sequence[str]) -> int

which parses the words after the command's name with a parser of its own (so that any parser will
do), prints to stdout and returns the exit code, and add a row to COMMANDS. The module is imported
only when its command is called, so a heavy import slows nothing else; inside it, import heavy
things after parsing, so that ``--help`` is quick. :func:`hyphenated` lets an argparse parser accept
``--sample_rate`` for ``--sample-rate``. An :class:`~hf_dp.errors.HfDpError` that escapes becomes
one line on stderr and exit code 2.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from hf_dp.errors import HfDpError

# command -> (module, one-line help)
COMMANDS: dict[str, tuple[str, str]] = {
    "train": (
        "hf_dp.cli.train",
        "fine-tune a model and publish a checkpoint whose card states epsilon",
    ),
    "eval": ("hf_dp.cli.eval", "metrics of a classifier on evaluation rows, trained or zero-shot"),
    "sweep": (
        "hf_dp.cli.sweep",
        "a grid of runs over settings and seeds, with what they cost together",
    ),
    "plan": ("hf_dp.cli.plan", "what a run or a recipe will cost, before anything is spent"),
    "account": (
        "hf_dp.cli.account",
        "epsilon of a run, or the noise a target needs (no GPU, no torch)",
    ),
    "partitions": (
        "hf_dp.cli.partitions",
        "the weight matrices of a model, which DP-FROST chooses from",
    ),
    "bench": (
        "hf_dp.cli.bench",
        "speed and memory of private training beside non-private training",
    ),
}


def hyphenated(argv: Sequence[str]) -> list[str]:
    """Option names with hyphens for underscores; values (after ``=`` or on their own) are left as
    they are."""
    words = []
    for word in argv:
        name, equals, value = word.partition("=")
        words.append((name.replace("_", "-") if name.startswith("--") else name) + equals + value)
    return words


def usage() -> str:
    """The text of ``hf-dp --help``."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    lines = [
        "usage: hf-dp COMMAND ...",
        "",
        "Differentially private fine-tuning for Hugging Face.",
        "",
        "commands:",
    ]
    return "\n".join([*lines, *rows, "", "`hf-dp COMMAND --help` describes one command."])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code (2 for wrong arguments, as argparse)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] not in COMMANDS:
        print(f"hf-dp: unknown command {words[0]!r}; known: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return int(importlib.import_module(COMMANDS[words[0]][0]).main(words[1:]))
    except HfDpError as error:
        print(f"hf-dp {words[0]}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
