"""The one question: what epsilon did these events cost?"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from typing import Protocol, cast

from hf_dp._validate import in_unit_interval, one_of
from hf_dp.accounting.composition import Composition, compose
from hf_dp.accounting.events import Event
from hf_dp.accounting.ranges import Range
from hf_dp.accounting.value import Epsilon

ACCOUNTANTS: tuple[str, ...] = ("pld", "rdp", "prv", "gdp_clt")
"""Known accountants; each is the module ``hf_dp.accounting.<name>``, imported when first asked (a
second of scipy)."""

BOUNDS: tuple[str, ...] = ("pld", "rdp", "prv")
"""Those whose result is an upper bound and may be calibrated to."""

RELATIONS: tuple[str, ...] = ("zero_out", "add_remove", "replace_one")
"""What a neighboring data set is: one record's contribution replaced by nothing, the number of
records being public (the default); one record more or less (the same epsilon, but then nothing of
the run may depend on the number of records); one record replaced by another."""


class Accountant(Protocol):
    """What a module of this package offers to be an accountant."""

    RANGE: Range

    def epsilon(self, composition: Composition, delta: float, relation: str) -> Epsilon:
        """Epsilon at ``delta``: 0 for nothing, infinity without noise.

        AccountingRangeError where it may be wrong, UnsupportedEventError for a kind of event or
        relation it does not know.
        """
        ...


def load(accountant: str) -> Accountant:
    """The accountant of this name; InvalidArgumentError for an unknown one."""
    name = one_of("accountant", accountant, ACCOUNTANTS)
    return cast(Accountant, importlib.import_module(f"hf_dp.accounting.{name}"))


def epsilon(
    events: Event | Iterable[Event],
    delta: float,
    accountant: str = "pld",
    relation: str = "zero_out",
) -> Epsilon:
    """Epsilon of one event or of several composed adaptively.

    Changes nothing: it may be asked at any time, during a run included.

    Args:
        events: what ran, in any order; an empty sequence costs 0.
        delta: in (0, 1); meaningful only well below 1 / number of records.
        accountant: "pld" (default; min of PLD and RDP), "rdp", "prv" (upper end) or "gdp_clt" (an
            estimate).
        relation: one of RELATIONS; "replace_one" only with "pld".

    Raises:
        InvalidArgumentError: delta, accountant or relation is not one.
        AccountingRangeError: this accountant is not known to be right here; the message names one
            that is.
        UnsupportedEventError: an event of a kind that is unknown, or unknown to this accountant or
            for this relation.
    """
    load(accountant)  # names the known ones when this is none
    one_of("relation", relation, RELATIONS)
    return _epsilon(accountant, compose(events), in_unit_interval("delta", delta), relation)


# a log, a card and privacy.json ask the same question of the same ledger
@functools.lru_cache(maxsize=4096)
def _epsilon(accountant: str, composition: Composition, delta: float, relation: str) -> Epsilon:
    return load(accountant).epsilon(composition, delta, relation)
