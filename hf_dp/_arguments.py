"""Arguments written once: a group is a dataclass of fields with their help and their checks.

Docstrings, command lines and recipes are made from the same fields. A field says what its value
must be, a group's ``NEEDS`` what one argument asks of another, and ``problems`` what is left.
"""

from __future__ import annotations

import dataclasses
import functools
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from hf_dp._dataclasses import default_of
from hf_dp._validate import integer, invalid, one_of, positive, refuse_unknown
from hf_dp.errors import InvalidArgumentError, UnsupportedArgumentError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# (name, value) -> checked value; or the values that a text may have
Check = Callable[[str, object], object] | Sequence[str]


class _Help(str):
    """A field's help, and its check: ``HfArgumentParser`` takes nothing else for metadata."""

    check: Check | None


def argument(default: object, text: str, check: Check | None = None) -> Any:
    """Return a dataclass field with its help, checked when set; ``check`` is None for what its type
    says: a truth value, a whole number >= 1, a number > 0."""
    metadata = {"help": _Help(text)}
    metadata["help"].check = check
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Problems(dict[str, InvalidArgumentError]):
    """The errors of the arguments of an object or mapping, by name; the first of each is kept."""

    def __init__(self, args: object) -> None:
        super().__init__()
        self._args = args

    def value(self, name: str) -> Any:
        """Return the value of an argument."""
        return self._args[name] if isinstance(self._args, Mapping) else getattr(self._args, name)

    def refuse(
        self,
        name: str,
        expected: str,
        next_move: str,
        error: type[InvalidArgumentError] = InvalidArgumentError,
    ) -> None:
        """Note that the value of an argument is not what was expected."""
        self.setdefault(name, invalid(name, self.value(name), expected, next_move, error))

    def unsupported(self, name: str, expected: str, next_move: str) -> None:
        """Note that an argument which is known elsewhere is not for this run."""
        self.refuse(name, expected, next_move, UnsupportedArgumentError)

    def attempt(self, name: str, check: Callable[..., object], *details: object) -> None:
        """Set the argument to what the check returns, or note its error."""
        try:
            setattr(self._args, name, check(name, self.value(name), *details))
        except InvalidArgumentError as error:
            self.setdefault(name, error)

    def join(self, others: Mapping[str, InvalidArgumentError]) -> Self:
        """Take over the problems of arguments that have none yet."""
        self.update({name: each for name, each in others.items() if name not in self})
        return self

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


@dataclasses.dataclass(frozen=True)
class Need:
    """Arguments, ``names`` with blanks between them, that stay at their defaults unless ``other``
    has one of these ``values``, or one that they say yes to."""

    names: str
    other: str
    values: tuple[object, ...] | Callable[[Any], bool]
    next_move: str
    error: type[InvalidArgumentError] = InvalidArgumentError

    def note(self, args: DataclassInstance, found: Problems) -> None:
        """Note the arguments that were set in vain, unless ``other`` is what is wrong."""
        if self.other in found:
            return
        theirs = getattr(args, self.other)
        if self.values(theirs) if callable(self.values) else theirs in self.values:
            return
        for name in self.names.split():
            default = default_of(args.__dataclass_fields__[name])
            if getattr(args, name) != default:
                expected = f"to be left at {default!r} with {self.other}={theirs!r}"
                found.refuse(name, expected, self.next_move, self.error)


def is_given(value: object) -> bool:
    """Return whether an argument is set whose default is None."""
    return value is not None


class ArgumentGroup:
    """The base of a group of arguments; a subclass is a dataclass."""

    NEEDS: ClassVar[tuple[Need, ...]] = ()

    def __new__(cls, /, *args: object, **given: object) -> Self:
        """Raise UnknownArgumentError for a name that the subclass does not take."""
        refuse_unknown(cls.__init__, given)
        return super().__new__(cls)

    @staticmethod
    def problems(args: Any, found: Problems) -> None:
        """Note what else contradicts another argument; ``found`` has what is wrong alone."""


def check_groups(
    groups: Iterable[type[ArgumentGroup]], args: DataclassInstance, found: Problems
) -> None:
    """Check each field by itself, and set it to the checked value; then those that need others."""
    groups = list(groups)
    for field in [each for group in groups for each in own_fields(group)]:
        if getattr(args, field.name) is not None or field.default is not None:
            check = field.metadata["help"].check or _BY_TYPE.get(_type_of(field))
            if callable(check):
                found.attempt(field.name, check)
            elif check is not None:
                found.attempt(field.name, one_of, check)
    for group in groups:
        for need in group.NEEDS:
            need.note(args, found)
        group.problems(args, found)


def _type_of(field: dataclasses.Field[Any]) -> str:
    """Return the name of a field's type, without None."""
    return getattr(field.type, "__name__", str(field.type)).removesuffix(" | None")


def true_or_false(name: str, value: object) -> bool:
    """Return a truth value; refuse text."""
    if not isinstance(value, bool):
        raise invalid(name, value, "to be True or False", "Write it without quotes.")
    return value


_BY_TYPE: Mapping[str, Callable[[str, object], object]] = {
    "bool": true_or_false,
    "int": functools.partial(integer, minimum=1),
    "float": positive,
}


def own_fields(group: type) -> list[dataclasses.Field[Any]]:
    """Return the fields that a dataclass declares itself."""
    return [each for each in dataclasses.fields(group) if each.name in group.__annotations__]


def documented(groups: Iterable[type]) -> str:
    """Return the part of a docstring that describes the fields of these groups, from their help."""
    lines: list[str] = []
    for group in groups:
        title = (group.__doc__ or "").strip().splitlines()[0].rstrip(".")
        lines += ["", f"> {title}", ""]
        for field in own_fields(group):
            default = default_of(field)
            shown = f'"{default}"' if isinstance(default, str) else default
            said = "*optional*" + ("" if default is None else f", defaults to `{shown}`")
            lines.append(f"    {field.name} (`{_type_of(field)}`, {said}):")
            lines += textwrap.wrap(
                field.metadata["help"], 100, initial_indent=" " * 8, subsequent_indent=" " * 8
            )
    return "\n".join(lines[1:])


def numbers_from_text(args: DataclassInstance) -> Problems:
    """Convert numbers given as text (YAML leaves ``5e-4`` a string), and return what is none."""
    problems = Problems(args)
    for field in dataclasses.fields(args):
        value, kind = getattr(args, field.name), _type_of(field)
        if isinstance(value, str) and kind in ("int", "float"):
            try:
                setattr(args, field.name, _number(value, kind))
            except ValueError:
                wanted = "a whole number" if kind == "int" else "a number"
                problems.refuse(field.name, f"to be {wanted}", "Correct it, or remove it.")
    return problems


def _number(text: str, kind: str) -> int | float:
    """Return the number that a text spells; "1e3" is a whole number. Raises: ValueError."""
    number = float(text)
    if kind == "float":
        return number
    return int(number) if number.is_integer() and abs(number) < 2**53 else int(text)
