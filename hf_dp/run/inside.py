"""The one way to see, in a private run, what is not noised yet."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_dp.plans.samplers import Sampler as LogicalSampler


class Observer:
    """Stands inside the gate of a run (:attr:`hf_dp.run.private_run.PrivateRun.inside`).

    Each moment does nothing. What an observer shows of these values is not covered by epsilon.

    Attributes: adds_rows: whether it put rows of its own among those that are drawn.
    """

    adds_rows = False

    def drawn(self, sampler: LogicalSampler) -> Any:
        """Return a sampler of what goes through the model, of that which is drawn."""
        return sampler

    def clipped(self, sums: dict[str, Tensor]) -> None:
        """See a step's clipped sums before their noise, by parameter."""

    def noised(self, sums: dict[str, Tensor]) -> None:
        """See the same sums after their noise."""

    def stepped(self, loss_sum: Tensor) -> None:
        """See the sum of a step's losses in this process, when the step is released."""
