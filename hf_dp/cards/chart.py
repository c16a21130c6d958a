"""Epsilon over the steps, drawn with characters: a picture that needs no file and no renderer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_dp.accounting import Event, epsilon, event_from_dict
from hf_dp.errors import AccountingRangeError
from hf_dp.statement.results import epsilon_text
from hf_dp.statement.statement import PrivacyStatement

_ROWS, _WIDTH = 4, 40  # each row costs an accounting of its own, at every save


def epsilon_over_steps(statement: PrivacyStatement) -> str | None:
    """Return bars of the epsilon spent after each quarter of what was released.

    Return None where a run has no epsilon, or released only once: one number is no picture.
    """
    events = [_event(row) for row in statement.mechanisms]
    total = sum(event.steps for event in events)
    if not statement.proven or total < 2:
        return None
    rows = min(_ROWS, total)
    counts = [-(-total * row // rows) for row in range(1, rows + 1)]
    try:
        spent = [
            epsilon(_first(events, count), statement.delta, statement.accountant).rounded_up()
            for count in counts
        ]
    except AccountingRangeError:  # of a part of what ran: the accountant knows only the whole
        return None
    most = max(spent)
    width = len(f"{total:,}")
    what = "step" if len(events) == 1 else "release"
    bars = [
        f"{count:>{width},}  {'#' * max(1, round(_WIDTH * value / most)):<{_WIDTH}}  "
        f"{epsilon_text(value)}"
        for count, value in zip(counts, spent, strict=True)
        if most > 0
    ]
    return "\n".join([f"after {what}, epsilon ({statement.accountant})", *bars]) if bars else None


def _event(row: Mapping[str, Any]) -> Event:
    return event_from_dict({name: value for name, value in row.items() if name != "purpose"})


def _first(events: list[Event], count: int) -> list[Event]:
    """Return the first ``count`` steps of a ledger, in its order."""
    found: list[Event] = []
    for event in events:
        steps = min(event.steps, count)
        if steps:
            found.append(event.with_steps(steps))
        count -= steps
    return found
