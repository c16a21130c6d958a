"""What a tuner gets of a run without privacy: no plan, no ledger, nothing clipped or noised.

A recipe can then be compared with itself without privacy. What a private run chooses by noisy
numbers is chosen by the same numbers without noise, and nothing is claimed of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from hf_dp.distributed.processes import Processes
from hf_dp.run.clock import Clock


@dataclass
class PlainRun:
    """One run in ``non_private`` mode, as a tuner sees it.

    Attributes:
        model: what trains; a tuner may replace it.
        device: where the model is.
        processes: that train it together.
        sample: ``sample(rate)`` gives the collated batches of a sample of the training rows that
            holds each with that probability.
        clock: of the run.
        losses: ``losses(model, batch)`` gives per-example losses, (b,).
    """

    model: nn.Module
    device: torch.device
    processes: Processes
    sample: Callable[[float], Iterator[Any]]
    losses: Callable[[nn.Module, Any], Tensor]
    clock: Clock = field(default_factory=Clock)


def sampled_batches(
    dataset: Any,
    collator: Callable[[list[Any]], Any],
    rate: float,
    batch_size: int,
    generator: np.random.Generator,
) -> DataLoader:
    """Return the batches of a sample of the rows; each row is in it with probability ``rate``."""
    chosen = np.flatnonzero(generator.random(len(dataset)) < rate)
    return DataLoader(Subset(dataset, chosen.tolist()), batch_size, collate_fn=collator)
