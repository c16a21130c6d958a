"""What a private run takes from accelerate, and what it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from accelerate import Accelerator
from torch import nn


@contextmanager
def without_ddp(accelerator: Accelerator) -> Iterator[None]:
    """Prepare models inside without ``DistributedDataParallel``.

    DDP would reduce gradients that autograd writes. A private step has none: its clipped sums are
    added up once per logical batch, with their noise. DDP would hold buckets as large as the
    gradient for nothing.
    """
    if accelerator.num_processes == 1:
        yield
        return
    prepare: Any = accelerator.prepare_model
    accelerator.prepare_model = partial(prepare, evaluation_mode=True)  # type: ignore[method-assign]
    try:
        yield
    finally:
        accelerator.prepare_model = prepare  # type: ignore[method-assign]


def without_tied_copies(model: nn.Module, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a gathered state dict with each tied parameter once, as one process saves it."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
    tied = {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first[id(parameter)] != name
    }
    return {name: value for name, value in state_dict.items() if name not in tied}
