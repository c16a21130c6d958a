"""Dataclasses as plain data: written, read back and checked; and what a field's default is."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypeVar

from hf_dp.errors import ConfigError, HfDpError, LedgerError

T = TypeVar("T")
_types_of = functools.cache(typing.get_type_hints)  # which reads each annotation's text anew


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return a field's default, made anew where there is a factory for it."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


_UNASKED = "unasked"


def unless_asked(default: Any) -> Any:
    """Return a field that is written only where it is not at its default, of what few ask for."""
    return dataclasses.field(default=default, kw_only=True, metadata={_UNASKED: True})


class Named:
    """Base of dataclasses that are written with their unique ``name``, and read back by it."""

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
    own = {
        item.name: plain(getattr(value, item.name))
        for item in dataclasses.fields(value)
        if not (item.metadata.get(_UNASKED) and getattr(value, item.name) == item.default)
    }
    return {"name": value.name, **own} if isinstance(value, Named) else own


def read(cls: type[T], values: object, error: type[HfDpError] = ConfigError) -> T:
    """Read back what :func:`plain` wrote of a ``cls``, or raise ``error``."""
    if isinstance(values, cls):
        return values
    given = dict(values) if isinstance(values, Mapping) else {}
    if issubclass(cls, Named):
        name = given.pop("name", None)
        if not isinstance(name, str) or name not in cls.known:
            raise error(
                f"Expected the name of a {cls.__name__} to be one of {sorted(cls.known)}, got "
                f"{name!r}. Import the module that registers it."
            )
        cls = cls.known[name]
    found: type[Any] = cls
    known = {item.name: item for item in dataclasses.fields(found)}
    needed = {name for name, item in known.items() if not item.metadata.get(_UNASKED)}
    unknown, missing = sorted(given.keys() - known), sorted(needed - given.keys())
    if unknown or missing:
        raise error(
            f"{cls.__name__} cannot be read: it lacks or adds fields (unknown {unknown}, missing "
            f"{missing}). It was edited, or written by another version of hf_dp."
        )
    types = _types_of(cls)  # type: ignore[arg-type]  # a type has a hash
    return cls(**{name: _read_field(types[name], value, error) for name, value in given.items()})


def _read_field(kind: Any, value: Any, error: type[HfDpError]) -> Any:
    """Return the value of a field of this type, whose dataclasses are read, too."""
    kinds = typing.get_args(kind) or (kind,)
    inner = [
        each
        for each in kinds
        if isinstance(each, type) and (dataclasses.is_dataclass(each) or issubclass(each, Named))
    ]
    if not inner or (value is None and type(None) in kinds):
        return value
    if typing.get_origin(kind) is not tuple:
        return read(inner[0], value, error)
    several = isinstance(value, (list, tuple))
    return tuple(read(inner[0], each, error) for each in value) if several else value


class Kept:
    """Base of dataclasses that are kept with a run as the plain data of all their fields."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, JSON-ready; :meth:`from_dict` reads it back."""
        values: dict[str, Any] = plain(self)
        return values

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """Read back what :meth:`to_dict` wrote; LedgerError for unknown, missing or bad fields."""
        try:
            return read(cls, values, LedgerError)
        except (TypeError, ValueError) as error:
            raise LedgerError(f"{cls.__name__} cannot be read: {error}") from error
