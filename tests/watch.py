"""Notes on the calls of a method while it does what it always does."""

from collections.abc import Callable
from typing import Any


def watch(
    patch: Any,
    owner: Any,
    name: str,
    after: Callable[..., Any] = lambda result, *given, **named: result,
    *,
    before: Callable[..., Any] | None = None,
    notes: list[Any] | None = None,
) -> list[Any]:
    """Return a list that gets a note of each call: ``after(result, *arguments)``, or what
    ``before(*arguments)`` says before it. Args: notes: those on other calls, to go on with."""
    notes, honest = [] if notes is None else notes, getattr(owner, name)

    def watched(*given: Any, **named: Any) -> Any:
        if before is not None:
            notes.append(before(*given, **named))
        result = honest(*given, **named)
        if before is None:
            notes.append(after(result, *given, **named))
        return result

    patch.setattr(owner, name, watched)
    return notes
