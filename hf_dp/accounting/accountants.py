"""The accountants, and the questions that each answers: what did these events cost, and what do
others say about them?"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

from hf_dp._validate import in_unit_interval, one_of
from hf_dp.accounting.composition import Composition, Range, compose
from hf_dp.accounting.event import Event, as_events
from hf_dp.accounting.knows import ACCOUNTANTS, BOUNDS, KINDS, KNOWS
from hf_dp.accounting.value import Epsilon
from hf_dp.errors import AccountingRangeError, ConfigError, UnsupportedEventError

RELATIONS: tuple[str, ...] = ("zero_out", "add_remove", "replace_one")
"""What a neighboring data set is.

"zero_out" (the default): one example's contribution replaced by nothing, with the number of
examples public. "add_remove": one example more or less; the epsilon is the same, but then nothing
in the run may depend on the number of examples. "replace_one": one example replaced by another.
"""

PAPERS_FIGURE = (
    "{:.3f} is the paper's own figure, under assumptions that do not hold for what ran; it is no "
    "epsilon of this run."
)
ABOVE_A_BOUND = "its estimate is above a bound, which says more"


class Accountant(Protocol):
    """What a module of this package, or an object from outside, offers as an accountant."""

    RANGE: Range

    def epsilon(self, composition: Composition, delta: float, relation: str) -> Epsilon:
        """Return epsilon at ``delta``. It is asked only of what has noise and depends on examples,
        and what its row in :mod:`hf_dp.accounting.knows` has.

        Raises: AccountingRangeError: the result may be wrong here.
        """
        ...


_REGISTERED: dict[str, Accountant] = {}


def register_accountant(
    name: str, accountant: Accountant, kinds: Iterable[str], *, bound: bool
) -> None:
    """Make an accountant known, also to arguments, statements and cards.

    Args:
        kinds: what it bounds, as :mod:`hf_dp.accounting.knows` names it; all else is refused.
        bound: whether its result is an upper bound, so that noise may be calibrated to it.

    Raises: ConfigError for a name that is taken, or a kind that is none.
    """
    kinds = frozenset(kinds)
    if name in KNOWS or not kinds <= set(KINDS):
        raise ConfigError(
            f"Expected an accountant with a name of its own, of kinds {sorted(KINDS)}, got "
            f"{name!r} of {sorted(kinds)}."
        )
    KNOWS[name] = kinds
    ACCOUNTANTS.append(name)
    if bound:
        BOUNDS.append(name)
    _REGISTERED[name] = accountant


def load(accountant: str) -> Accountant:
    """Return the accountant of this name; raise InvalidArgumentError for an unknown one."""
    name = one_of("accountant", accountant, ACCOUNTANTS)
    if name in _REGISTERED:
        return _REGISTERED[name]
    return cast(Accountant, importlib.import_module(f"hf_dp.accounting.{name}"))


def epsilon(
    events: Event | Iterable[Event],
    delta: float,
    accountant: str = "pld",
    relation: str = "zero_out",
) -> Epsilon:
    """Return the epsilon of one event, or of several composed adaptively.

    Changes nothing, so it may be called at any time, even during a run.

    Args:
        events: what ran, in any order; an empty sequence costs 0.
        delta: in (0, 1); meaningful only well below 1 / number of examples.
        accountant: "pld" (default; min of PLD and RDP), "rdp", "prv" (upper end) or "gdp_clt" (an
            estimate).
        relation: one of RELATIONS; "replace_one" only with "pld".

    Raises:
        InvalidArgumentError: delta, accountant or relation is invalid.
        AccountingRangeError: this accountant is not known to be right here; the message names one
            that is.
        UnsupportedEventError: an event is of an unknown kind, or of one that this accountant does
            not know, or not under this relation.
    """
    load(accountant)  # raises for an unknown name
    one_of("relation", relation, RELATIONS)
    return _epsilon(accountant, compose(events), in_unit_interval("delta", delta), relation)


# Cached: a log, a card and privacy.json ask the same question of the same ledger.
@functools.lru_cache(maxsize=4096)
def _epsilon(accountant: str, composition: Composition, delta: float, relation: str) -> Epsilon:
    composition.refuse(accountant, relation)
    if composition.empty or composition.noiseless:
        value = math.inf if composition.noiseless else 0.0
        return Epsilon(value, "bound" if accountant in BOUNDS else "estimate")
    return load(accountant).epsilon(composition, delta, relation)


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

    Arguments and errors are those of :func:`epsilon`, with one exception: an accountant that is out
    of its range, or cannot describe an event, gives an answer without epsilon. So does DP-FP as
    published; the note then has the paper's figure. An estimate above one of the bounds is left
    out: a bound says more.
    """
    events = as_events(events)
    answers = []
    for name in accountants:
        try:
            value = epsilon(events, delta, name, relation)
        except (AccountingRangeError, UnsupportedEventError) as error:
            answers.append(Answer(name, None, str(error)))
        else:
            if value.kind == "not established":
                answers.append(Answer(name, None, PAPERS_FIGURE.format(value.rounded_up())))
            else:
                answers.append(Answer(name, value))
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
