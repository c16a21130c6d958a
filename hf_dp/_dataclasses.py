"""Dataclasses as plain data: what a reader of JSON checks, and what a field's default is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hf_dp.errors import HfDpError


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


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return a field's default, made anew where there is a factory for it."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
