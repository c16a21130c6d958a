"""Numbers given as text: YAML leaves ``5e-4`` a string."""

from __future__ import annotations

import functools
import types
import typing
from typing import Any

from hf_dp._arguments import Problems


def numbers_from_text(args: Any) -> Problems:
    """Convert numbers given as text, in place, and return what cannot be read, by name."""
    problems = Problems(args)
    for name, kind in _number_fields(type(args)).items():  # type: ignore[arg-type]
        value = getattr(args, name)
        if isinstance(value, str):
            try:
                setattr(args, name, _number(value, kind))
            except ValueError:
                wanted = "a whole number" if kind is int else "a number"
                problems.refuse(
                    name, f"to be {wanted}", "Correct it, or remove it for the default."
                )
    return problems


@functools.cache
def _number_fields(cls: type) -> dict[str, type]:
    """Return the fields whose type is a plain number (or None), inherited ones included."""
    numbers: dict[str, type] = {}
    for name, hint in typing.get_type_hints(cls).items():
        kinds = set(typing.get_args(hint) or [hint]) - {types.NoneType}
        for number in (int, float):
            if kinds == {number}:
                numbers[name] = number
    return numbers


def _number(text: str, kind: type) -> int | float:
    """Return the number that a text spells; "1e3" is a whole number. Raises: ValueError."""
    number = float(text)
    if kind is float:
        return number
    try:
        return int(text)
    except ValueError:
        if not number.is_integer():
            raise
        return int(number)
