"""Options of commands, made from fields of dataclasses; names with hyphens or underscores."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Container, Iterable
from typing import Any, NoReturn

from hf_dp._dataclasses import default_of
from hf_dp.cli.tasks import DEFAULT_TASK, TASKS

_METAVARS = {int: "N", float: "X", bool: "True|False"}


class Parser(argparse.ArgumentParser):
    """A parser that takes whole options only, with hyphens or underscores in their names, and names
    the nearest for one it does not know."""

    def __init__(self, prog: str | None = None, **options: Any) -> None:
        super().__init__(prog, **{"formatter_class": formatter, "allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse the words; values stay as they are, and so do options that it does not know."""
        known = self._names()
        return super().parse_known_args([_spelled(word, known) for word in args or ()], namespace)

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


def _spelled(word: str, known: Container[str]) -> str:
    """Return a word with the name of its option as the parser spells it."""
    name, equals, value = word.partition("=")
    if not name.startswith("--") or name in known:
        return word
    spellings = (f"--{name[2:].replace(*pair)}" for pair in (("-", "_"), ("_", "-")))
    return next((one for one in spellings if one in known), name) + equals + value


def near_names(given: Iterable[str], known: Iterable[str]) -> str:
    """Return `` (did you mean --NAME?)`` for those of the given names that are near a known one."""
    near = [found for name in given for found in difflib.get_close_matches(name, known, n=1)]
    return f" (did you mean {', '.join(near)}?)" if near else ""


def formatter(prog: str) -> argparse.HelpFormatter:
    """Return a formatter with 100 columns that keeps the line breaks of descriptions."""
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=100)


def add_fields(
    parser: argparse.ArgumentParser, cls: type, only: Container[str] | None = None
) -> None:
    """Add a group with an option for each field of a dataclass, with its help.

    An option that is not given is no attribute of the result. Args: only: the fields that become
    options; None for all.
    """
    title = inspect.cleandoc(cls.__doc__ or "").splitlines()[0].rstrip(".")
    add = parser.add_argument_group(title[0].lower() + title[1:]).add_argument
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if only is not None and field.name not in only:
            continue
        kind, default, text = _kind(hints[field.name]), default_of(field), field.metadata["help"]
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": field.name}
        repeated = typing.get_origin(kind) is list
        if repeated:
            options["nargs"], kind = "+", typing.get_args(kind)[0]
            default = " ".join(map(str, default if isinstance(default, list) else ()))
        if kind is bool:  # as HfArgumentParser: the name alone means True
            options |= {"nargs": "?", "const": True}
        shown = default not in (None, "", False, dataclasses.MISSING) and default != {}
        text = f"{text.rstrip('.')} (default: {default})" if shown else text
        options["help"] = text.replace("%", "%%")
        add(
            f"--{field.name}",
            type=_truth if kind is bool else kind if kind in (int, float) else str,
            metavar=_METAVARS.get(kind, "TEXT"),
            **options,
        )


def _kind(hint: Any) -> Any:
    """Return the type of a field on the command line: text if text is allowed, and never None."""
    if not isinstance(hint, types.UnionType):
        return hint
    kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    return str if str in kinds else kinds[0]


def _truth(word: str) -> bool:
    if word.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected True or False, got {word!r}")
    return word.lower() == "true"


def taken(cls: type, given: argparse.Namespace) -> Any:
    """Return an instance of a dataclass from the options that were given."""
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in vars(given).items() if name in names})


def command_parser(
    prog: str,
    usage: str,
    description: str,
    epilog: str,
    base: argparse.ArgumentParser,
    arguments: Iterable[type],
) -> argparse.ArgumentParser:
    """Return a parser that is only there for its help.

    Args:
        base: the parser of the options that the command reads itself.
        arguments: the dataclasses of the other options.
    """
    parser = Parser(
        prog,
        usage=usage,
        description=description,
        epilog=epilog,
        parents=[base],
        add_help=False,
        conflict_handler="resolve",
    )
    for cls in arguments:
        add_fields(parser, cls)
    return parser


def list_tasks(names: Iterable[str]) -> str:
    """Return a line for each task."""
    width = max(map(len, TASKS))
    return "\n".join(["tasks:", *(f"  {name:<{width}}  {TASKS[name].help}" for name in names)])


def common_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of what ``train`` and ``eval`` read before the arguments of a task.

    Call its ``parse_known_args``: the remaining words belong to the task.
    """
    parser = Parser(prog, add_help=False)
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="show this text and exit")
    add("--config", metavar="FILE", help="flat YAML: any argument listed here, by its name")
    add(
        "--task",
        metavar="NAME",
        help=f"one of the tasks above (default: {DEFAULT_TASK}); --help lists its arguments",
    )
    return parser
