"""The one gate through which everything noised passes: ledger first, then noise, then the value.

Nothing else in hf_dp draws Gaussian noise or appends to a run's ledger (``tests/run/test_gate.py``
searches for it). A :class:`Release` exists only after its event is durable, so no order of calls
shows a value that the ledger does not know; its noise comes from that very event, so no call can
ask for less.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hf_dp.accounting import SUM, VECTORS
from hf_dp.distributed.processes import Processes, add_up_with_noise
from hf_dp.errors import LedgerError
from hf_dp.noise import SecretRandomness
from hf_dp.plans.mechanism import PlannedRelease
from hf_dp.plans.samplers import Draws
from hf_dp.run.ledger import RunLedger


class Observer:
    """Stands inside the gate of a run. What it shows of these values is not covered by epsilon.

    Attributes: adds_rows: whether it put rows of its own among those that are drawn.
    """

    adds_rows = False

    def drawn(self, draws: Draws) -> Draws:
        """Return what goes through the model, of that which is drawn."""
        return draws

    def clipped(self, sums: dict[str, Tensor]) -> None:
        """See a step's clipped sums before their noise, by parameter, in units of its gauge."""

    def noised(self, sums: dict[str, Tensor]) -> None:
        """See the same sums after their noise."""

    def stepped(self, loss_sum: Tensor) -> None:
        """See the sum of a step's losses in this process, when the step is released."""


class IndependentNoise:
    """The shape of the noise: drawn anew for each value of each release.

    A gate has one such object. Noise that is correlated over steps is a subclass, which keeps what
    it needs of earlier ones (:mod:`hf_dp.run.banded_noise`).
    """

    def __init__(self, randomness: SecretRandomness):
        self.randomness = randomness

    def of(self, planned: PlannedRelease, step: int) -> IndependentNoise:
        """Return the noise of one release, before it is recorded; ``step`` training steps are."""
        return self

    def like(self, values: Tensor, part: str, std: float) -> Tensor:
        """Return the noise of this standard deviation on a part of a release, of its shape."""
        return self.randomness.gaussian_like(values, std)

    def spread(self, part: str) -> float:
        """Return the standard deviation of :meth:`like`, in units of ``std``."""
        return 1.0

    def end(self) -> None:
        """Note that the release was made, without an error."""


class Gate:
    """Records releases in a run's durable ledger and hands out the right to make them."""

    def __init__(self, ledger: RunLedger, noise: IndependentNoise):
        self._ledger, self._noise = ledger, noise

    def pay_ahead(self, planned: PlannedRelease) -> None:
        """Record ``planned``, durably, before the first of the steps that it pays for.

        Raises: BudgetExceededError, LedgerError, as :meth:`hf_dp.run.ledger.RunLedger.append`.
        """
        self._ledger.append(planned.event, planned.purpose)
        self._ledger.pay(planned.event.steps)

    @contextmanager
    def release(self, planned: PlannedRelease, drawn_for: int | None = None) -> Iterator[Release]:
        """Record ``planned``, durably, and give what lets its values out, inside the ``with`` only.

        What is paid ahead is in the ledger already; each step uses up one that it paid for. A draw
        may be released as the training step that it was ``drawn_for`` alone, where that matters.

        Raises:
            BudgetExceededError: it would pass the target; nothing is recorded then.
            LedgerError: the step was not paid ahead, or is another one, or the run is not open.
        """
        step = self._ledger.steps_made
        if planned.event.correlated_steps > 1 and drawn_for != step:
            raise LedgerError(
                f"Expected what was drawn for step {step}, the next in the ledger, got what was "
                f"drawn for {'no step' if drawn_for is None else f'step {drawn_for}'}, which is of "
                "another class of rows. Take draws again (`mechanism.logical_batches()`)."
            )
        noise = self._noise.of(planned, step)
        if planned.event.paid_ahead:
            self._ledger.use_paid()
        else:
            self._ledger.append(planned.event, planned.purpose)
        release = Release(planned, noise, self._ledger)
        try:
            yield release
        finally:
            release.close()
        noise.end()


class Release:
    """The right to let out what one recorded event covers."""

    def __init__(self, planned: PlannedRelease, noise: IndependentNoise, ledger: RunLedger):
        self.planned = planned
        self._shape: IndependentNoise | None = noise
        self._ledger: RunLedger | None = ledger
        self._out: set[str] = set()

    def sum(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add up one sum over the examples of all processes, given as named parts, add noise once,
        in place, and return it.

        Raises: LedgerError the second time, which would be another release.
        """
        self._add_up(list(sums.values()), SUM)
        return sums

    def beside(self, part: str, total: Tensor) -> Tensor:
        """Add up one sum of bounded numbers or vectors over the examples of all processes, add
        noise to each number once, in place, and return it.

        Args: part: of the event, such as :data:`hf_dp.accounting.LOSS`.

        Raises: LedgerError the second time, which would be another release; ConfigError when the
            recorded event has no such part.
        """
        self._add_up([total], part)
        return total

    def vectors(self, vectors: Tensor) -> Tensor:
        """Return (b, d) vectors, each of one example alone, with noise in each coordinate.

        Differentiable. Where the event has ``several_forwards``, a step may call it for several
        physical batches.

        Raises: LedgerError the second time otherwise, which would be another release.
        """
        self._source()
        if not self.planned.event.several_forwards:
            self._once(VECTORS)
        return vectors + self._noise(vectors, VECTORS)

    def noise_std(self, part: str) -> float:
        """Return the standard deviation of each number's noise, in this release."""
        return self.planned.noise_std(part) * self._source().spread(part)

    def is_of(self, ledger: RunLedger, planned: PlannedRelease) -> bool:
        """Return whether this release was recorded in this ledger, as planned."""
        return self._ledger is ledger and self.planned == planned

    def close(self) -> None:
        """Let nothing more out."""
        self._shape = None

    @torch.no_grad()
    def _add_up(self, sums: list[Tensor], part: str) -> None:
        self._once(part)
        processes = Processes() if self._ledger is None else self._ledger.processes
        add_up_with_noise(sums, lambda total: self._noise(total, part), processes)

    def _once(self, part: str) -> None:
        if part in self._out:
            raise LedgerError(f"The {part} of this release left already. Record another release.")
        self._out.add(part)

    def _noise(self, values: Tensor, part: str) -> Tensor:
        return self._source().like(values, part, self.planned.noise_std(part))

    def _source(self) -> IndependentNoise:
        if self._shape is None:
            raise LedgerError("This release is closed. Record another one to let more out.")
        return self._shape


class NothingReleased(Release):
    """Stands for a step that uses nothing of the private rows but what was released before."""

    def __init__(self) -> None:
        self._shape, self._ledger, self._out = None, None, set()
