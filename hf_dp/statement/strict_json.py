"""Read JSON that is evidence, and refuse what hf_dp cannot have written."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn


def loads(text: str) -> Any:
    """Parse ``text``.

    Raises: ValueError or RecursionError for incomplete JSON, for a key that appears twice, and for
        numbers that are not finite.
    """
    return json.loads(
        text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_no_duplicates
    )


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that hf_dp writes")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_constant(text)


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a key appears twice among {[key for key, _ in pairs]}")
    return found
