"""The accountants, and the question that each answers: what epsilon did these events cost?"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from typing import Protocol, cast

from hf_dp._validate import in_unit_interval, one_of
from hf_dp.accounting.composition import Composition, compose
from hf_dp.accounting.event import Event
from hf_dp.accounting.knows import ACCOUNTANTS, note_accountant
from hf_dp.accounting.ranges import Range
from hf_dp.accounting.value import Epsilon

RELATIONS: tuple[str, ...] = ("zero_out", "add_remove", "replace_one")
"""What a neighboring data set is.

"zero_out" (the default): one example's contribution replaced by nothing, with the number of
examples public. "add_remove": one example more or less; the epsilon is the same, but then nothing
in the run may depend on the number of examples. "replace_one": one example replaced by another.
"""


class Accountant(Protocol):
    """What a module of this package, or an object from outside, offers as an accountant."""

    RANGE: Range

    def epsilon(self, composition: Composition, delta: float, relation: str) -> Epsilon:
        """Return epsilon at ``delta``: 0 for nothing, infinity without noise. It is asked only what
        its row in :mod:`hf_dp.accounting.knows` has.

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
    note_accountant(name, kinds, bound)
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
    return load(accountant).epsilon(composition, delta, relation)
