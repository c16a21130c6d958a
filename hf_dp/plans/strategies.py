"""How clipped sums may be computed, and in how much memory: never what they are."""

from __future__ import annotations

from hf_dp import _validate

# One backward pass with all records held, two passes over one graph, or explicit per-example
# gradients.
STRATEGIES = ("book_keeping", "two_pass", "per_example")
MEMORY_RATIO = 1.05


def check_memory_ratio(name: str, value: object) -> float:
    """Return the memory that clipping may take relative to training without, at least 1.

    Raises: InvalidArgumentError, naming the argument.
    """
    ratio = _validate.positive(name, value)
    if ratio < 1:
        raise _validate.invalid(
            name,
            value,
            "to be at least 1, the memory of training without privacy",
            "1.05 allows 5 % more, for speed.",
        )
    return ratio
