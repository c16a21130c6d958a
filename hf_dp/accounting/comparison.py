"""All accountants side by side: what each says about the same events, or why it does not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hf_dp.accounting.accountants import ACCOUNTANTS, epsilon
from hf_dp.accounting.events import Event
from hf_dp.accounting.value import Epsilon
from hf_dp.errors import AccountingRangeError, UnsupportedEventError

PAPERS_FIGURE = (
    "{:.3f} is the paper's own figure, under assumptions that do not hold for what ran; it is no "
    "epsilon of this run."
)


@dataclass(frozen=True)
class Answer:
    """What one accountant says.

    Attributes:
        accountant: its name.
        epsilon: with its kind, or None.
        note: why epsilon is None; otherwise empty.
    """

    accountant: str
    epsilon: Epsilon | None
    note: str = ""


def compare(
    events: Event | Iterable[Event],
    delta: float,
    accountants: Sequence[str] = ACCOUNTANTS,
    relation: str = "zero_out",
) -> tuple[Answer, ...]:
    """Return one answer for each accountant.

    Arguments and errors are those of :func:`hf_dp.accounting.epsilon`, with one exception: an
    accountant that is out of its range, or cannot describe an event, gives an answer without
    epsilon. So does DP-FP as published; the note then has the paper's figure.
    """
    events = (events,) if isinstance(events, Event) else tuple(events)
    answers = []
    for name in accountants:
        try:
            value = epsilon(events, delta, name, relation)
            if value.kind == "not established":
                answers.append(Answer(name, None, PAPERS_FIGURE.format(value.rounded_up())))
            else:
                answers.append(Answer(name, value))
        except (AccountingRangeError, UnsupportedEventError) as error:
            answers.append(Answer(name, None, str(error)))
    return tuple(answers)
