"""The shape of noise that is correlated over steps: row t of C^-1 z, in units of the mechanism.

With c_0 .. c_{b-1} the first column of C, which is Toeplitz, what a step adds is
``x_t = (z_t - c_1 x_{t-1} - ... - c_{b-1} x_{t-b+1}) / c_0``. So the sum of a step must be released
as row t of its block, or the block must end: what the accountant counts holds for C G + z alone
(:class:`hf_dp.accounting.events.BandedGaussian`).
"""

from __future__ import annotations

from collections.abc import Sequence
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

_OTHER_SUMS = (
    "Expected sums of the same shapes as in the steps before: what trains has changed. Train the "
    "same parameters in all steps, or leave `bands` out."
)


class BandedNoise(IndependentNoise):
    """Correlated noise on the sums of steps whose event says so; independent noise on all else.

    A block ends whenever a step may be in the ledger and was not released as the next row: another
    was recorded between, or something was raised between the ledger's line and the release's end.
    Raises: ConfigError for columns whose norm is above 1, of which no event tells.
    """

    def __init__(self, randomness: SecretRandomness, column: Sequence[float]):
        super().__init__(randomness)
        if not (column[0] > 0 and sum(Fraction(c) ** 2 for c in column) <= 1):
            raise ConfigError(
                f"Expected a column of C with c_0 > 0 and a norm of at most 1, got {column}: the "
                "sensitivity is larger than the ledger says. Divide it by its norm."
            )
        self.column = tuple(column)
        self.rows: list[_Row] = []  # of the block, the last b - 1, the newest first

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("Earlier steps' noise is neither copied nor saved: it reveals later noise.")

    def of(self, planned: PlannedRelease, step: int) -> IndependentNoise:
        bands = planned.event.correlated_steps
        if bands == 1:
            return IndependentNoise(self.randomness)
        if bands != len(self.column):
            raise ConfigError(
                f"Expected an event of {len(self.column)} bands, got {bands}. Release the plan's."
            )
        before, self.rows = self.rows, []  # which are there again after a whole row alone
        return _Row(self, step, before if before and before[0].step == step - 1 else [])


class _Row(IndependentNoise):
    """The noise of one step on its sum: the row of its block after the rows ``before``.

    Attributes: drawn: noise as it was added, in the order in which it was drawn; std: of its z.
    """

    def __init__(self, block: BandedNoise, step: int, before: list[_Row]):
        super().__init__(block.randomness)
        self.block, self.step, self.before, self.std = block, step, before, 0.0
        self.place: int = before[0].place + 1 if before else 0
        self.drawn: list[Tensor] = []

    @torch.no_grad()
    def like(self, values: Tensor, part: str, std: float) -> Tensor:
        """Return the next noise of the sum. Each row is in units of its own ``std``: where the
        sensitivity differs from step to step, noise divided by it is correlated, not noise."""
        noise = super().like(values, part, std)
        if part != SUM:
            return noise
        self.std, number = std, len(self.drawn)
        for weight, row in zip(self.block.column[1:], self.before, strict=False):
            if number >= len(row.drawn) or row.drawn[number].shape != noise.shape:
                raise LedgerError(_OTHER_SUMS)
            noise.add_(row.drawn[number], alpha=-weight * std / row.std)
        # Kept as the very tensor that is added: where processes hold copies of one shard, the noise
        # of one of them is written into it.
        self.drawn.append(noise.div_(self.block.column[0]))
        return self.drawn[-1]

    def spread(self, part: str) -> float:
        return float(noise_of_steps(self.block.column, self.place + 1)[-1]) if part == SUM else 1.0

    def end(self) -> None:
        rows, self.before = [self, *self.before], []
        if any(len(row.drawn) != len(self.drawn) for row in rows[1:] if self.drawn):
            raise LedgerError(_OTHER_SUMS)
        self.block.rows = rows[: len(self.block.column) - 1] if self.drawn else []
