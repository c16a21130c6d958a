"""All accountants side by side: what each says about the same events, or why it does not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hf_dp.accounting.accountants import epsilon
from hf_dp.accounting.event import Event, as_events
from hf_dp.accounting.knows import ACCOUNTANTS
from hf_dp.accounting.value import Epsilon
from hf_dp.errors import AccountingRangeError, UnsupportedEventError

PAPERS_FIGURE = (
    "{:.3f} is the paper's own figure, under assumptions that do not hold for what ran; it is no "
    "epsilon of this run."
)

ABOVE_A_BOUND = "its estimate is above a bound, which says more"


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
    epsilon. So does DP-FP as published; the note then has the paper's figure. An estimate above one
    of the bounds is left out: a bound says more.
    """
    events = as_events(events)
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
    values = [answer.epsilon for answer in answers if answer.epsilon is not None]
    least = min((value.value for value in values if value.kind == "bound"), default=math.inf)
    return tuple(_without_estimate_above(least, answer) for answer in answers)


def _without_estimate_above(bound: float, answer: Answer) -> Answer:
    value = answer.epsilon
    if value is None:
        return answer
    if value.kind == "estimate" and value.value > bound:
        return Answer(answer.accountant, None, ABOVE_A_BOUND)
    if value.estimate is not None and value.estimate > bound:
        return replace(answer, epsilon=replace(value, estimate=None))
    return answer
