"""What every event has: a description to read back, and the relations that it holds for."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar


class Described:
    """Base of the events, which are frozen dataclasses.

    Class attributes:
        relations: those of :data:`hf_dp.accounting.RELATIONS` under which the analysis holds.
        restriction: why it does not hold under the others; empty if it holds under all.
        established: whether a bound on its epsilon is known at all.
    """

    relations: ClassVar[tuple[str, ...]] = ("zero_out", "add_remove", "replace_one")
    restriction: ClassVar[str] = ""
    established: ClassVar[bool] = True

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready description that :func:`hf_dp.accounting.event_from_dict` reads."""
        return {"type": type(self).__name__, **dataclasses.asdict(self)}  # type: ignore[call-overload]
