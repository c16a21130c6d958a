"""What every event has: a description that can be read back, and the neighboring relations that it
holds for."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar


class Described:
    """Base of the events, which are frozen dataclasses.

    Attributes (of the class):
        relations: of :data:`hf_dp.accounting.RELATIONS`, those under which the event's analysis
            holds.
        restriction: why not under the others; empty where all hold.
        established: whether a bound on its epsilon is known at all.
    """

    relations: ClassVar[tuple[str, ...]] = ("zero_out", "add_remove", "replace_one")
    restriction: ClassVar[str] = ""
    established: ClassVar[bool] = True

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description that :func:`hf_dp.accounting.event_from_dict` reads back."""
        return {"type": type(self).__name__, **dataclasses.asdict(self)}  # type: ignore[call-overload]
