"""How batches are made: memory and speed, never what a step computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BatchOptions:
    """Options of the physical batches and of the data loader.

    Args:
        physical_batch_size: most examples of a physical batch.
        max_tokens: most tokens of one, padding included; None: no limit.
        quiet: no progress bars.
        num_workers, pin_memory, persistent_workers, prefetch_factor, multiprocessing_context: as
            :class:`torch.utils.data.DataLoader` takes them.
    """

    physical_batch_size: int = 8
    max_tokens: int | None = None
    quiet: bool = False
    num_workers: int = 0
    pin_memory: bool = False
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    multiprocessing_context: Any = None
