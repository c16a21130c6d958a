"""Options that several commands share, and option names with hyphens or underscores."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hf_dp.cli.tasks import DEFAULT_TASK


def hyphenated(argv: Sequence[str]) -> list[str]:
    """Return the words with hyphens for underscores in option names.

    Values stay as they are, whether they follow ``=`` or stand on their own.
    """
    words = []
    for word in argv:
        name, equals, value = word.partition("=")
        words.append((name.replace("_", "-") if name.startswith("--") else name) + equals + value)
    return words


def common_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of what ``train`` and ``eval`` read before the arguments of a task.

    Call its ``parse_known_args``: the remaining words belong to the task.
    """
    parser = argparse.ArgumentParser(prog, add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="show this text and exit")
    add("--config", metavar="FILE", help="flat YAML: any argument listed here, by its name")
    add(
        "--task",
        metavar="NAME",
        help=f"one of the tasks above (default: {DEFAULT_TASK}); --help lists its arguments",
    )
    return parser
