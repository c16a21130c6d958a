"""What people changed in the metadata of a card, which is kept when the card is made again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from hf_dp.cards.details import CardDetails
from hf_dp.cards.metadata import KEY
from hf_dp.errors import InvalidArgumentError, LedgerError

_OF_THE_HUB = {  # its name in the metadata -> its name in CardDetails
    "license": "license",
    "license_name": "license_name",
    "license_link": "license_link",
    "language": "language",
    "base_model": "base_model",
    "datasets": "dataset",
    "pipeline_tag": "task_tag",
}
_OURS = {*_OF_THE_HUB, "tags", "library_name", "model-index", KEY}


def front_matter(card: str) -> dict[str, Any]:
    """Return the YAML block at the beginning of a card; empty without one.

    Raises: ValueError for a block that cannot be read, or in which a key stands twice.
    """
    parts = card.split("---\n", 2)
    if len(parts) < 3 or parts[0].strip():
        return {}
    try:
        node = yaml.compose(parts[1], Loader=yaml.SafeLoader)
        values = yaml.safe_load(parts[1])
    except yaml.YAMLError as error:
        raise ValueError(f"its YAML block is not valid: {error}") from error
    if not isinstance(values, dict) or not isinstance(node, yaml.MappingNode):
        raise ValueError("its YAML block is not a mapping of names to values")
    keys = [getattr(key, "value", None) for key, _ in node.value]
    if len(set(keys)) < len(keys):
        raise ValueError("a key stands twice in its YAML block")
    return values


def with_edits(details: CardDetails, made: Mapping[str, Any], path: Path) -> CardDetails:
    """Return the details with what people changed in the card that is there.

    Args: made: the metadata as hf_dp would make them from ``details``.

    Raises: LedgerError for a card that cannot be read, or metadata that cannot be kept, by name.
    """
    if not path.is_file():
        return details
    try:
        now = front_matter(path.read_text(encoding="utf-8"))
        changed = {
            name: _as_given(key, now[key])
            for key, name in _OF_THE_HUB.items()
            if key in now and now[key] != made.get(key)
        }
        added = [tag for tag in now.get("tags") or () if tag not in (made.get("tags") or ())]
        if added:
            changed["tags"] = (*details.tags, *added)
        extra = {
            key: str(value) if isinstance(value, date) else value
            for key, value in now.items()
            if key not in _OURS
        }
        details = details.with_given(**changed) if changed else details
        return replace(details, metadata={**details.metadata, **extra})
    except (ValueError, TypeError, OSError, InvalidArgumentError) as error:
        raise LedgerError(
            f"The metadata of {path} cannot be kept ({error}). Change its YAML block, or delete "
            "the file to have it made anew."
        ) from error


def _as_given(key: str, value: Any) -> Any:
    """Return a value of the metadata as CardDetails takes it: one name where a card has one."""
    if key == "language":
        return (value,) if isinstance(value, str) else tuple(value)
    if isinstance(value, list):
        if len(value) != 1:
            raise ValueError(f"expected one {key}, got {value!r}")
        return value[0]
    return value
