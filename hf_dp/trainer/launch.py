"""Processes and devices of a private run: what it takes from accelerate, and what it leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import resources
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.utils import logging

from hf_dp._arguments import Problems
from hf_dp._validate import invalid
from hf_dp.errors import InvalidArgumentError, UnsupportedArgumentError
from hf_dp.statement.facts import CLIPPED_GRADIENT_NORM

logger = logging.get_logger(__name__)

_NOT_FOR_SEVERAL = ("cpu", "mps")  # kinds of devices that several processes cannot divide


def has_accelerator() -> bool:
    """Return whether this machine has devices that several processes can divide among them."""
    if not torch.accelerator.is_available():
        return False
    found = torch.accelerator.current_accelerator()
    return found is not None and found.type not in _NOT_FOR_SEVERAL


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("true", "1", "yes")


def use_cpu_without_accelerator(args: TrainingArguments) -> None:
    """Set ``args.use_cpu`` where a launcher started several processes and there is no accelerator:
    accelerate would take each for the only one. Before devices are set up."""
    count = int(os.environ.get("WORLD_SIZE") or 1)
    if count > 1 and not args.use_cpu and not has_accelerator():
        args.use_cpu = True
        if os.environ.get("RANK") == "0":
            logger.warning(
                "There is no accelerator that the processes could share: the %d processes train "
                "on the CPU, as with use_cpu=True.",
                count,
            )


def processes_without_device(args: TrainingArguments) -> InvalidArgumentError | None:
    """Return the problem of a process that would take a device which this machine does not have."""
    if args.use_cpu or _is_on("ACCELERATE_USE_CPU") or not has_accelerator():
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


def launch_problems(args: Any) -> Problems:
    """Return the problems with processes and devices, after ``TrainingArguments.__post_init__``."""
    found, count = Problems(args), args.world_size
    # What `accelerate launch --cpu` sets for several processes, of which it starts only one.
    meant = {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys() and "WORLD_SIZE" not in os.environ
    if meant and _is_on("ACCELERATE_USE_CPU"):
        file = resources.files("hf_dp").joinpath("cli/accelerate/cpu_2_processes.yaml")
        found["num_processes"] = UnsupportedArgumentError(
            "`accelerate launch --cpu --num_processes N` started one process. Expected N of them, "
            "in private modes. Use "
            f"`accelerate launch --config_file {file}`, "
            "`torchrun --nproc_per_node 2` or `hf-dp train --num_processes 2`, with use_cpu=True "
            "where there is a GPU; for one process, unset MASTER_ADDR."
        )
    if args.n_gpu > 1:
        found.unsupported(
            "n_gpu",
            "to be at most 1 in private modes",
            "DataParallel splits batches behind the clipping engine's back. Set "
            "CUDA_VISIBLE_DEVICES to one device.",
        )
    kind = args.distributed_state.distributed_type if args.distributed_state else None
    if args.fsdp or _is_on("ACCELERATE_USE_FSDP"):
        if kind in (DistributedType.NO, DistributedType.MULTI_CPU):
            found.unsupported(
                "fsdp",
                "to be unset on a CPU, and with one process, in private modes",
                "accelerate would silently train whole copies. Remove it (on a CPU call "
                "torch.distributed.fsdp.fully_shard in a loop of your own with PrivateRun).",
            )
    if count > 1 and CLIPPED_GRADIENT_NORM in args.release:
        found.unsupported(
            "release",
            f"to be without {CLIPPED_GRADIENT_NORM!r} with {count} processes",
            "None of them has the whole sum before its noise. Launch one process, or remove it.",
        )
    return found


@contextmanager
def without_ddp(accelerator: Accelerator) -> Iterator[None]:
    """Prepare models without ``DistributedDataParallel``, which would hold buckets as large as the
    gradient for nothing: clipped sums are added up once per logical batch, with their noise."""
    if accelerator.num_processes == 1:
        yield
        return
    prepare = accelerator.prepare_model
    accelerator.prepare_model = partial(prepare, evaluation_mode=True)  # type: ignore[method-assign]
    try:
        yield
    finally:
        accelerator.prepare_model = prepare  # type: ignore[method-assign]


def without_tied_copies(model: nn.Module, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a gathered state dict with each tied parameter once, as one process saves it."""
    once = {name for name, _ in model.named_parameters()}
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: value for name, value in state_dict.items() if name not in every - once}
