"""The ledger: the append-only list of what ran on the private data, and why.

It is the evidence behind an epsilon. It is pure data; the trainer makes it durable. Steps are
counted when they ran, never when they were planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_dp._validate import invalid
from hf_dp.accounting.accountants import epsilon
from hf_dp.accounting.composition import Epsilon
from hf_dp.accounting.event import Description, Event, event_from_dict, refuse_stranger
from hf_dp.errors import LedgerError

TRAINING = "training"
SELECTION = "selection"
EARLIER = "earlier run"  # on the same rows, such as the one that trained the base model
RELEASE = "release"  # of representations or labels, once, before the first step


@dataclass(frozen=True)
class LedgerEntry:
    """Consecutive steps of one mechanism with one purpose, such as :data:`TRAINING`."""

    event: Event
    purpose: str

    def __post_init__(self) -> None:
        refuse_stranger(self.event)
        if not isinstance(self.purpose, str) or not self.purpose:
            raise invalid(
                "purpose", self.purpose, "to be a non-empty string", 'For example "training".'
            )
        if self.event.steps < 1:
            raise invalid("steps", self.event.steps, "to be >= 1", "A ledger holds what ran.")

    def continues(self, earlier: LedgerEntry) -> bool:
        """Return whether mechanism and purpose are the same; the number of steps may differ.

        What does not add up, such as two searches, continues nothing but this run's own.
        """
        if self.purpose != earlier.purpose or type(self.event) is not type(earlier.event):
            return False
        if not self.event.adds_up and self.purpose != TRAINING:
            return False
        return bool(self.event.with_steps(1) == earlier.event.with_steps(1))


class Ledger:
    """Append-only history of one run.

    Equal consecutive mechanisms are kept as one entry with more steps. Entries are immutable and
    cannot be removed or reordered.
    """

    def __init__(self) -> None:
        self._entries: list[LedgerEntry] = []

    def append(self, event: Event, purpose: str) -> None:
        """Note that ``event`` ran. Call this before its result becomes visible to anyone.

        Raises:
            InvalidArgumentError: no steps, or an empty purpose.
            UnsupportedEventError: not an event.
        """
        entry = LedgerEntry(event, purpose)
        if self._entries and entry.continues(self._entries[-1]):
            steps = self._entries[-1].event.steps + event.steps
            self._entries[-1] = LedgerEntry(event.with_steps(steps), purpose)
        else:
            self._entries.append(entry)

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """The history, in order."""
        return tuple(self._entries)

    @property
    def events(self) -> tuple[Event, ...]:
        """The events, in order, as :func:`hf_dp.accounting.epsilon` takes them."""
        return tuple(entry.event for entry in self._entries)

    def steps(self, purpose: str | None = None) -> int:
        """Count the steps that ran, for one purpose or for all."""
        return sum(entry.event.steps for entry in self._entries if purpose in (None, entry.purpose))

    def epsilon(self, delta: float, accountant: str = "pld") -> Epsilon:
        """Return what all entries together cost (see :func:`hf_dp.accounting.epsilon`)."""
        return epsilon(self.events, delta, accountant)

    def extends(self, other: Ledger) -> bool:
        """Return whether ``other``'s history is a prefix of this one, or equal to it.

        A run may resume from a checkpoint only if the run's ledger extends the checkpoint's.
        """
        if not other._entries:
            return True
        *earlier, last = other._entries
        here = len(earlier)
        if len(self._entries) <= here or self._entries[:here] != earlier:
            return False
        mine = self._entries[here]
        return mine == last or (mine.continues(last) and mine.event.steps >= last.event.steps)

    def to_list(self) -> list[Description]:
        """Return JSON-ready entries ``{"type", "purpose", ...event fields}``, in order."""
        entries = []
        for entry in self._entries:
            fields = entry.event.to_dict()
            entries.append({"type": fields.pop("type"), "purpose": entry.purpose, **fields})
        return entries

    @classmethod
    def from_list(cls, entries: Iterable[Mapping[str, Any]]) -> Ledger:
        """Return the ledger that ``to_list`` wrote.

        Raises: LedgerError when an entry cannot be read, since a ledger with a gap would
            under-report.
        """
        ledger = cls()
        if isinstance(entries, (str, bytes, Mapping)) or not isinstance(entries, Iterable):
            raise LedgerError(
                f"Expected a ledger as a list of rows, got {type(entries).__name__}. Pass what "
                "Ledger.to_list returned."
            )
        for number, entry in enumerate(entries):
            try:
                fields = dict(entry)
                purpose = fields.pop("purpose")
                event = event_from_dict(fields)
                if event.adds_up:
                    ledger.append(event, purpose)
                else:  # to_list has merged what one run made: rows side by side are of two
                    ledger._entries.append(LedgerEntry(event, purpose))
            except (KeyError, TypeError, ValueError) as error:
                raise LedgerError(
                    f"Row {number} of the ledger cannot be read: {entry!r} ({error}). Restore "
                    "the file from a backup; without it the privacy of this run is not known."
                ) from error
        return ledger

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self._entries == other._entries

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ledger({self.to_list()!r})"
