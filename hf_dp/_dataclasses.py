"""Dataclasses as plain data: written, read back and checked; and what a field's default is."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from hf_dp.errors import ConfigError, HfDpError, LedgerError

T = TypeVar("T")


def checked_fields(cls: type[Any], values: Any, error: type[HfDpError]) -> dict[str, Any]:
    """Return ``values`` as keyword arguments of a dataclass.

    Args: error: what to raise for unknown or missing fields, which it names.
    """
    known = [item.name for item in dataclasses.fields(cls)]
    given = dict(values) if isinstance(values, Mapping) else {}
    unknown, missing = sorted(set(given) - set(known)), sorted(set(known) - set(given))
    if unknown or missing:
        raise error(
            f"{cls.__name__} cannot be read: it lacks or adds fields (unknown {unknown}, missing "
            f"{missing}). It was edited, or written by another version of hf_dp."
        )
    return given


def from_plain(cls: type[T], values: object) -> T:
    """Make a dataclass of evidence from the plain data of all its fields.

    Raises: LedgerError for unknown, missing or bad fields.
    """
    try:
        return cls(**checked_fields(cls, values, LedgerError))
    except (TypeError, ValueError) as error:
        raise LedgerError(f"{cls.__name__} cannot be read: {error}") from error


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return a field's default, made anew where there is a factory for it."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


class Named:
    """Base of dataclasses that are written with their ``name``, and read back by it.

    Attributes (of the class): name: unique. known: by name, the classes that can be read.
    """

    name: ClassVar[str]
    known: ClassVar[dict[str, type[Any]]]


NamedClass = TypeVar("NamedClass", bound=Named)


def register(cls: type[NamedClass]) -> type[NamedClass]:
    """Make a class known by its ``name``: a class decorator.

    Raises: ConfigError when another class has that name.
    """
    if cls.known.setdefault(cls.name, cls) is not cls:
        raise ConfigError(f"Expected {cls.__name__} to have a name of its own, got {cls.name!r}.")
    return cls


def plain(value: Any) -> Any:
    """Return a value as JSON has it: dataclasses and mappings as dicts, tuples as lists."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    own = {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    return {"name": value.name, **own} if isinstance(value, Named) else own


def read(cls: type[T], values: object) -> T:
    """Read back what :func:`plain` wrote of a ``cls``.

    Raises: ConfigError for an unknown name, or fields that the class does not have; and what the
        class raises for a value that could not have been written.
    """
    given = dict(values) if isinstance(values, Mapping) else {}
    if issubclass(cls, Named):
        name = given.pop("name", None)
        if not isinstance(name, str) or name not in cls.known:
            raise ConfigError(
                f"Expected the name of a {cls.__name__} to be one of {sorted(cls.known)}, got "
                f"{name!r}. Import the module that registers it."
            )
        cls = cls.known[name]
    given = checked_fields(cls, given, ConfigError)
    types = typing.get_type_hints(cls)
    for name, value in given.items():
        kinds = typing.get_args(types[name]) or (types[name],)
        inner = [kind for kind in kinds if dataclasses.is_dataclass(kind) or _is_named(kind)]
        if inner and not (value is None and type(None) in kinds):
            given[name] = read(inner[0], value)
    return cls(**given)


def _is_named(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Named)
