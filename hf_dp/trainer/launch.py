"""What a private run takes from accelerate, and what it leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers.utils import logging

from hf_dp._validate import invalid
from hf_dp.errors import InvalidArgumentError

logger = logging.get_logger(__name__)

_NOT_FOR_SEVERAL = ("cpu", "mps")  # kinds of devices that several processes cannot divide


def has_accelerator() -> bool:
    """Return whether this machine has devices that several processes can divide among them."""
    if not torch.accelerator.is_available():
        return False
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type not in _NOT_FOR_SEVERAL


def use_cpu_without_accelerator(args: Any) -> None:
    """Set ``args.use_cpu`` where a launcher started several processes and there is no accelerator.

    Otherwise accelerate takes each of them for the only one. Call it before devices are set up.
    """
    count = int(os.environ.get("WORLD_SIZE") or 1)
    if count == 1 or args.use_cpu or has_accelerator():
        return
    args.use_cpu = True
    if os.environ.get("RANK") == "0":
        logger.warning(
            "No accelerator is here that several processes could divide: the %d processes train on "
            "the CPU, as with use_cpu=True.",
            count,
        )


def processes_without_device(args: Any) -> InvalidArgumentError | None:
    """Return the problem of a process that would take a device which this machine does not have."""
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes")
    if args.use_cpu or on_cpu or not has_accelerator():
        return None
    local, devices = int(os.environ.get("LOCAL_RANK") or 0), torch.accelerator.device_count()
    if local < devices:
        return None
    return invalid(
        "$LOCAL_RANK",
        local,
        f"to be below {devices}, the number of accelerators that this process sees",
        "Start at most one process for each of them, or set use_cpu=True.",
    )


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
