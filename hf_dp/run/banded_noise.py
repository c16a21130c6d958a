"""The shape of noise that is correlated over steps: row t of C^-1 z, in units of the mechanism.

With c_0 .. c_{b-1} the first column of C, which is Toeplitz, what a step adds is

    x_t = (z_t - c_1 x_{t-1} - ... - c_{b-1} x_{t-b+1}) / c_0

(It takes the noise of earlier steps as it was added: the inverse of a banded matrix is dense, so
their z alone would not do.) So the sum of a step must be released as row t of its block, or the
block must end: what the accountant counts holds for C G + z alone
(:class:`hf_dp.accounting.BandedGaussian`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from hf_dp.accounting import SUM
from hf_dp.errors import ConfigError, LedgerError
from hf_dp.noise import SecretRandomness
from hf_dp.plans.mechanism import PlannedRelease
from hf_dp.run.gate import IndependentNoise


@dataclass(frozen=True)
class Row:
    """Noise of a step, as it was added, in the order in which it was drawn; ``std``, that of z; and
    ``inverse``, the number in the first column of C^-1."""

    noise: tuple[Tensor, ...]
    std: float
    inverse: float


@dataclass(frozen=True)
class Block:
    """The rows of C that were released without a break.

    Args:
        rows: the last b - 1 of them, the newest first.
        squares: the squared norm of the newest row of C^-1, 0 before the first.
        next: the number of the step that is the next row, and of no other.
    """

    rows: tuple[Row, ...] = ()
    squares: float = 0.0
    next: int | None = None


class BandedNoise(IndependentNoise):
    """Correlated noise on the sums of steps whose event says so; independent noise on all else.

    A block ends, and the next step begins a new one, whenever a step may be in the ledger and was
    not released as the block's next row: another step was recorded between, or something was
    raised between the ledger's line and the end of the release. Neither copies nor files of it
    exist: with the noise of earlier steps, that of later ones is known in part.

    Args:
        randomness: the source of z.
        column: c_0 .. c_{b-1}.

    Raises: ConfigError for columns whose norm is above 1, of which no event tells.
    """

    def __init__(self, randomness: SecretRandomness, column: Sequence[float]):
        super().__init__(randomness)
        if not (column[0] > 0 and math.fsum(c * c for c in column) <= 1):
            raise ConfigError(
                f"Expected a first column of C with c_0 > 0 and a norm of at most 1, got {column}: "
                "the sensitivity would be larger than the ledger says. Divide it by its norm."
            )
        self.column = tuple(column)
        self._block = Block()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("Noise of earlier steps is neither copied nor saved: it tells of later.")

    @contextmanager
    def of(self, planned: PlannedRelease, step: int) -> Iterator[IndependentNoise]:
        bands = planned.event.correlated_steps
        if bands == 1:
            yield IndependentNoise(self.randomness)
            return
        if bands != len(self.column):
            raise ConfigError(
                f"Expected an event of {len(self.column)} bands, as many as C has, got {bands}. "
                "Release what the run's plan makes."
            )
        block, self._block = self._block, Block()  # which is there again after a whole row alone
        row = _NextRow(self.randomness, self.column, block if block.next == step else Block())
        yield row
        if row.whole:
            self._block = row.after(step)


class _NextRow(IndependentNoise):
    """The noise of one step: the next row of a block, on its sum."""

    def __init__(self, randomness: SecretRandomness, column: tuple[float, ...], block: Block):
        super().__init__(randomness)
        self._column, self._block = column, block
        self._drawn: list[Tensor] = []
        self._std, self.whole = 0.0, False
        taken = sum(c * r.inverse for c, r in zip(column[1:], block.rows, strict=False))
        self._inverse = (float(not block.rows) - taken) / column[0]
        self._squares = block.squares + self._inverse**2

    @torch.no_grad()
    def like(self, values: Tensor, part: str, std: float) -> Tensor:
        """Return the next noise of the sum. Each row is in units of its own ``std``: where the
        sensitivity differs from step to step, noise divided by it is correlated, not noise."""
        noise = super().like(values, part, std)
        if part != SUM:
            return noise
        self._std = std
        for weight, row in zip(self._column[1:], self._block.rows, strict=False):
            place = len(self._drawn)
            if place >= len(row.noise) or row.noise[place].shape != noise.shape:
                raise _other_sums()
            noise.add_(row.noise[place], alpha=-weight * std / row.std)
        # Kept as the very tensor that is added: where processes hold copies of one shard, the noise
        # of one of them is written into it.
        self._drawn.append(noise.div_(self._column[0]))
        return self._drawn[-1]

    def spread(self, part: str) -> float:
        return math.sqrt(self._squares) if part == SUM else 1.0

    def end(self, part: str) -> None:
        if part != SUM:
            return
        if any(len(row.noise) != len(self._drawn) for row in self._block.rows):
            raise _other_sums()
        self.whole = True

    def after(self, step: int) -> Block:
        """Return the block with this row, which was released as this step."""
        kept = (Row(tuple(self._drawn), self._std, self._inverse), *self._block.rows)
        return Block(kept[: len(self._column) - 1], self._squares, step + 1)


def _other_sums() -> LedgerError:
    return LedgerError(
        "Expected sums of the same shapes as in the steps before, whose noise is taken back in "
        "part: what trains has changed. Train the same parameters in all steps, or leave `bands` "
        "out."
    )
