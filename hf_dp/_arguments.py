"""Arguments written once: a group is a dataclass of fields with their help, and their checks.

Docstrings, command lines and recipes are made from the same fields. A group says in ``CHECKS`` what
each value must be, and in ``problems`` what contradicts another argument.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from hf_dp._dataclasses import default_of
from hf_dp._validate import invalid
from hf_dp.errors import InvalidArgumentError, UnsupportedArgumentError

# A validator of _validate's form, and what it takes after name and value.
Check = tuple[Any, ...]


def argument(default: Any, text: str) -> Any:
    """Return a dataclass field with its help; a list or a dict is copied for each instance."""
    metadata = {"help": text}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Problems(dict[str, InvalidArgumentError]):
    """The errors of arguments, by name; of several errors of one argument the first is kept."""

    def __init__(self, args: object) -> None:
        super().__init__()
        self._args = args

    def refuse(
        self,
        name: str,
        expected: str,
        next_move: str,
        error: type[InvalidArgumentError] = InvalidArgumentError,
    ) -> None:
        """Note that the value of an argument is not what was expected."""
        self.setdefault(name, invalid(name, getattr(self._args, name), expected, next_move, error))

    def unsupported(self, name: str, expected: str, next_move: str) -> None:
        """Note that an argument which is known elsewhere is not for this run."""
        self.refuse(name, expected, next_move, UnsupportedArgumentError)

    def attempt(self, name: str, check: Callable[..., object], *details: object) -> None:
        """Set the argument to what the check returns, or note its error."""
        try:
            setattr(self._args, name, check(name, getattr(self._args, name), *details))
        except InvalidArgumentError as error:
            self.setdefault(name, error)

    def raise_all(self) -> None:
        """Raise one error for all problems: a single problem unchanged, several as a list."""
        errors = list(self.values())
        if not errors:
            return
        if len(errors) == 1:
            raise errors[0]
        unsupported = all(isinstance(error, UnsupportedArgumentError) for error in errors)
        kind = UnsupportedArgumentError if unsupported else InvalidArgumentError
        head = f"{len(errors)} arguments must change before this run can start:"
        raise kind("\n- ".join([head, *map(str, errors)]))


class ArgumentGroup:
    """The base of a group of arguments; a subclass is a dataclass.

    Attributes: CHECKS: by field, the validator and its details. Flags need none. An unset value is
        not checked where unset is the default.
    """

    CHECKS: ClassVar[Mapping[str, Check]] = {}

    @staticmethod
    def problems(args: Any, found: Problems) -> None:
        """Note what contradicts another argument; values that are wrong alone are in ``found``."""


def check_fields(group: type[ArgumentGroup], args: Any, found: Problems) -> None:
    """Check each field of a group by itself, and set it to the checked value."""
    for field in own_fields(group):
        value, check = getattr(args, field.name), group.CHECKS.get(field.name)
        if value is None and field.default is None:
            continue
        if field.type in ("bool", bool):
            found.attempt(field.name, true_or_false)
        elif check is not None:
            found.attempt(field.name, *check)


def own_fields(group: type) -> list[dataclasses.Field[Any]]:
    """Return the fields that a dataclass declares itself."""
    return [each for each in dataclasses.fields(group) if each.name in group.__annotations__]


def documented(groups: Iterable[type]) -> str:
    """Return the part of a docstring that describes the fields of these groups, from their help."""
    lines: list[str] = []
    for group in groups:
        title = (group.__doc__ or "").strip().splitlines()[0].rstrip(".")
        lines += ["", f"    > {title}", ""]
        for field in own_fields(group):
            default = default_of(field)
            shown = f'"{default}"' if isinstance(default, str) else default
            said = "*optional*" + ("" if default is None else f", defaults to `{shown}`")
            lines.append(
                f"        {field.name} (`{str(field.type).removesuffix(' | None')}`, {said}):"
            )
            lines += textwrap.wrap(
                field.metadata["help"], 100, initial_indent=" " * 12, subsequent_indent=" " * 12
            )
    return "\n".join(lines[1:])


def true_or_false(name: str, value: object) -> bool:
    """Return a truth value; refuse text."""
    if not isinstance(value, bool):
        raise invalid(name, value, "to be True or False", "Write it without quotes.")
    return value
