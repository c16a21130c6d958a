"""Options of commands, made from fields of dataclasses; names with hyphens or underscores. And the
tables that commands print."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

from hf_dp._dataclasses import default_of
from hf_dp.errors import ConfigError

T = TypeVar("T")
_METAVARS = {int: "N", float: "X", bool: "True|False"}


class Parser(argparse.ArgumentParser):
    """A parser that takes whole options only, with hyphens or underscores in their names, and names
    the nearest for one it does not know."""

    def __init__(self, prog: str | None = None, **options: Any) -> None:
        super().__init__(prog, **{"formatter_class": _formatter, "allow_abbrev": False, **options})

    def option(self, name: str, text: str, metavar: str | None = None, **more: Any) -> None:
        """Add an option, or a word without dashes, with its help."""
        self.add_argument(name, help=text, metavar=metavar, **more)

    def switch(self, name: str, text: str) -> None:
        """Add an option without a value."""
        self.add_argument(name, help=text, action="store_true")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the words; values stay as they are, and so do options that it does not know."""
        known = self.names()
        return super().parse_known_args([_spelled(word, known) for word in args or ()], namespace)

    def error(self, message: str) -> NoReturn:
        """End with the message, as argparse does; raise ConfigError for unknown options."""
        if message.startswith("unrecognized arguments"):
            check_names(given_options(message.split()), self.names(), "option")
        super().error(message)

    def names(self) -> set[str]:
        """Return the options that it and its commands know."""
        names = set(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                names = names.union(*(parser.names() for parser in action.choices.values()))
        return names


def _spelled(word: str, known: Container[str]) -> str:
    """Return a word with the name of its option as the parser spells it."""
    name, equals, value = word.partition("=")
    if not name.startswith("--") or name in known:
        return word
    spellings = (f"--{name[2:].replace(*pair)}" for pair in (("-", "_"), ("_", "-")))
    return next((one for one in spellings if one in known), name) + equals + value


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=100)


def given_options(words: Sequence[str]) -> dict[str, str]:
    """Return the options among words, underscores in their names, with the word that follows."""
    found = {}
    for place, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            after = words[place + 1] if place + 1 < len(words) else ""
            found[name.replace("-", "_")] = value if equals else after
    return found


def check_names(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise ConfigError for every given name that is not known, with the nearest that is."""
    known = {name.removeprefix("--").replace("-", "_") for name in known}
    problems = []
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            problems.append(f"`{name}`" + (f" (did you mean `{near[0]}`?)" if near else ""))
    if problems:
        raise ConfigError(f"Unknown {what} {', '.join(problems)}. See --help for all names.")


def add_fields(
    parser: argparse.ArgumentParser, cls: type, only: Container[str] | None = None
) -> None:
    """Add a group with an option, and its help, for each field of a dataclass, or for these
    ``only``. One that is not given is no attribute of the result."""
    title = inspect.cleandoc(cls.__doc__ or "").splitlines()[0].rstrip(".")
    add = parser.add_argument_group(title[0].lower() + title[1:]).add_argument
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if only is not None and field.name not in only:
            continue
        kind, default, text = _kind(hints[field.name]), default_of(field), field.metadata["help"]
        nargs = "?" if kind is bool else None  # as HfArgumentParser: the name alone means True
        if typing.get_origin(kind) in (list, tuple):
            nargs, kind = "+", typing.get_args(kind)[0]
            default = " ".join(map(str, default if isinstance(default, (list, tuple)) else ()))
        if default not in (None, "", False, dataclasses.MISSING) and default != {}:
            text = f"{text.rstrip('.')} (default: {default})"
        add(
            f"--{field.name}",
            type=_truth if kind is bool else kind if kind in (int, float) else str,
            metavar=_METAVARS.get(kind, "TEXT"),
            help=text.replace("%", "%%"),
            nargs=nargs,
            const=True if kind is bool else None,
            default=argparse.SUPPRESS,
            dest=field.name,
        )


def _kind(hint: type) -> type:
    """Return the type of a field on the command line: text if text is allowed, and never None."""
    if not isinstance(hint, types.UnionType):
        return hint
    kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    return str if str in kinds else kinds[0]


def _truth(word: str) -> bool:
    if word.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected True or False, got {word!r}")
    return word.lower() == "true"


def taken(cls: Callable[..., T], given: argparse.Namespace) -> T:
    """Return an instance of a dataclass from the options that were given."""
    names = inspect.signature(cls).parameters
    return cls(**{name: value for name, value in vars(given).items() if name in names})


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return columns as wide as their widest cell; the first and the last stand to the left."""
    table = [list(header), *map(list, rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    last = len(header) - 1
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in (0, last) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    )
