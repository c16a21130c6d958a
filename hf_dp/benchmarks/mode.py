"""The interface of a benchmark mode: one way to form the gradient of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

from torch import Tensor, nn

from hf_dp.benchmarks.workload import Batch, Workload, forward_precision
from hf_dp.errors import HfDpError
from hf_dp.losses import per_example_loss

CLIPPING_NORM = 0.1  # the library's default; its value changes no operation


class Refused(HfDpError):
    """A mode cannot run this workload; the message is the reason, for its row."""


class BenchmarkMode(ABC):
    """One way to form a gradient.

    Attributes:
        note: what the reader must know beside the numbers, or "".
    """

    note = ""

    def __init__(self, model: nn.Module, workload: Workload):
        self.model = model
        self.workload = workload

    @abstractmethod
    def step(self, batches: Sequence[Batch]) -> None:
        """Run forward and backward of one logical batch.

        The result stays until the next step or :meth:`reset`.
        """

    @abstractmethod
    def reset(self) -> None:
        """Drop the result, so that another mode can use the model; this is not timed."""

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """Return the result of the last step by name: mean gradients, or clipped sums."""

    def forms(self) -> Counter[tuple[tuple[int, ...], str]]:
        """Count the parameters of each shape and form of per-example gradients in the last step."""
        return Counter()

    def losses(self, batch: Batch, chunked: bool = False) -> Tensor:
        """Return one loss per example, (b,)."""
        with forward_precision(self.workload):
            return per_example_loss(self.model, batch, chunked)
