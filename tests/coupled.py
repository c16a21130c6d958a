"""Randomness that a row keeps, whichever other rows there are: to compare runs with and without one."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from hf_dp.noise import SecretRandomness


class Coupled(SecretRandomness):
    """The same noise in every run, and for each row the same randomness of its own, whichever rows
    stand before it."""

    rows: Sequence[int] = ()

    def example_seed(self, index: int | None) -> int:
        row = -1 if index is None else self.rows[index]
        return zlib.crc32(b"%d" % row)
