"""Options that several commands share, and option names with hyphens or underscores."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import NoReturn

from hf_dp.cli.tasks import DEFAULT_TASK


class Parser(argparse.ArgumentParser):
    """A parser that names the nearest option for one that it does not know."""

    def error(self, message: str) -> NoReturn:
        """End with the message, as argparse does."""
        if message.startswith("unrecognized arguments"):
            given = [word for word in message.split() if word.startswith("--")]
            message += near_names([word.partition("=")[0] for word in given], self._names())
        super().error(message)

    def _names(self) -> set[str]:
        names = set(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                names = names.union(*(parser._names() for parser in action.choices.values()))
        return names


def near_names(given: Iterable[str], known: Iterable[str]) -> str:
    """Return `` (did you mean --NAME?)`` for those of the given names that are near a known one."""
    near = [found for name in given for found in difflib.get_close_matches(name, known, n=1)]
    return f" (did you mean {', '.join(near)}?)" if near else ""


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
    parser = Parser(prog, add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="show this text and exit")
    add("--config", metavar="FILE", help="flat YAML: any argument listed here, by its name")
    add(
        "--task",
        metavar="NAME",
        help=f"one of the tasks above (default: {DEFAULT_TASK}); --help lists its arguments",
    )
    return parser
