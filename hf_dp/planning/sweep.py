"""Parse ``key=64..4096`` and ``key=1,2,4``: values of one setting to try, all others fixed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from hf_dp._validate import invalid

_MOST = 100  # values


def parse_sweep(text: str, keys: Mapping[str, type]) -> tuple[str, list[float]]:
    """Return the key and its values: a list, or a range by doubling, both ends included.

    Args:
        keys: what may be swept, and whether it counts (int) or measures (float).

    Raises: InvalidArgumentError.
    """
    name, equals, values = text.partition("=")
    key = name.strip().replace("-", "_")
    if key not in keys or not equals:
        near = difflib.get_close_matches(key, keys, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "For example expected_batch_size=64..4096."
        raise invalid("sweep", text, f"to be KEY=VALUES with KEY one of {sorted(keys)}", hint)
    kind = keys[key]
    try:
        low, dots, high = values.partition("..")
        numbers = (
            _doubling(kind(low), kind(high))
            if dots
            else [kind(value) for value in values.split(",")]
        )
    except ValueError as error:
        raise invalid(
            "sweep",
            text,
            f"to have values like 64..4096 or 64,128 ({kind.__name__})",
            str(error).capitalize() + ".",
        ) from error
    return key, numbers


def _doubling(low: float, high: float) -> list[float]:
    if not 0 < low <= high:
        raise ValueError("a range goes from a positive number to one that is not smaller")
    numbers = [low]
    while numbers[-1] * 2 < high:
        numbers.append(numbers[-1] * 2)
        if len(numbers) > _MOST:
            raise ValueError(f"the range has more than {_MOST} values")
    return numbers if numbers[-1] == high else [*numbers, high]
