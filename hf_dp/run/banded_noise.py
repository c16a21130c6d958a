"""The shape of noise that is correlated over steps: row t of C^-1 z, in units of the mechanism.

With c_0 .. c_{b-1} the first column of C, which is Toeplitz, what a step adds is

    x_t = (z_t - c_1 x_{t-1} - ... - c_{b-1} x_{t-b+1}) / c_0

(It takes the noise of earlier steps as it was added: the inverse of a banded matrix is dense, so
their z alone would not do.) So the sum of a step must be released as row t of its block, or the
block must end: what the accountant counts holds for C G + z alone
(:class:`hf_dp.accounting.BandedGaussian`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import NoReturn

import torch
from torch import Tensor

from hf_dp.accounting import SUM
from hf_dp.errors import ConfigError, LedgerError
from hf_dp.noise import SecretRandomness
from hf_dp.plans.bands import noise_of_steps
from hf_dp.plans.mechanism import PlannedRelease
from hf_dp.run.gate import IndependentNoise


@dataclass(frozen=True)
class Block:
    """The rows of C that were released without a break.

    Args:
        count: how many.
        next: the number of the step that is the next row, and of no other.
        kept: of the last b - 1 of them, the newest first: its noise as it was added, in the order
            in which it was drawn, and the ``std`` of its z.
    """

    count: int = 0
    next: int | None = None
    kept: tuple[tuple[list[Tensor], float], ...] = ()


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
        if not (column[0] > 0 and sum(Fraction(c) ** 2 for c in column) <= 1):
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
            kept = (row.drawn, row.std), *row.block.kept
            self._block = Block(row.block.count + 1, step + 1, kept[: bands - 1])


class _NextRow(IndependentNoise):
    """The noise of one step: the next row of a block, on its sum."""

    def __init__(self, randomness: SecretRandomness, column: tuple[float, ...], block: Block):
        super().__init__(randomness)
        self.column, self.block = column, block
        self.drawn: list[Tensor] = []
        self.std, self.whole = 0.0, False

    @torch.no_grad()
    def like(self, values: Tensor, part: str, std: float) -> Tensor:
        """Return the next noise of the sum. Each row is in units of its own ``std``: where the
        sensitivity differs from step to step, noise divided by it is correlated, not noise."""
        noise = super().like(values, part, std)
        if part != SUM:
            return noise
        self.std, place = std, len(self.drawn)
        for weight, (earlier, of_row) in zip(self.column[1:], self.block.kept, strict=False):
            if place >= len(earlier) or earlier[place].shape != noise.shape:
                raise _other_sums()
            noise.add_(earlier[place], alpha=-weight * std / of_row)
        # Kept as the very tensor that is added: where processes hold copies of one shard, the noise
        # of one of them is written into it.
        self.drawn.append(noise.div_(self.column[0]))
        return self.drawn[-1]

    def spread(self, part: str) -> float:
        if part != SUM:
            return 1.0
        return float(noise_of_steps(self.column, self.block.count + 1)[-1])

    def end(self, part: str) -> None:
        if part != SUM:
            return
        if any(len(earlier) != len(self.drawn) for earlier, _ in self.block.kept):
            raise _other_sums()
        self.whole = True


def _other_sums() -> LedgerError:
    return LedgerError(
        "Expected sums of the same shapes as in the steps before, whose noise is taken back in "
        "part: what trains has changed. Train the same parameters in all steps, or leave `bands` "
        "out."
    )
