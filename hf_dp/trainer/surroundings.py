"""Check the processes and devices of a private run, which are known once it has taken them."""

from __future__ import annotations

import os
from typing import Any

from accelerate.utils import DistributedType

from hf_dp._arguments import Problems
from hf_dp._validate import invalid
from hf_dp.errors import UnsupportedArgumentError
from hf_dp.statement.unnoised import CLIPPED_GRADIENT_NORM


def launch_problems(args: Any) -> Problems:
    """Return the problems with processes and devices, after ``TrainingArguments.__post_init__``."""
    found = Problems(args)
    _processes_apart(args, found)
    if args.n_gpu > 1:
        found.unsupported(
            "n_gpu",
            "to be at most 1 in private modes",
            "One process with several GPUs uses DataParallel, which splits batches behind the "
            "clipping engine's back. Set CUDA_VISIBLE_DEVICES to one device.",
        )
    shards = args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("true", "1")
    kind = args.distributed_state.distributed_type if args.distributed_state else None
    if shards and kind in (DistributedType.NO, DistributedType.MULTI_CPU):
        found.unsupported(
            "fsdp",
            "to be unset on a CPU, and with one process, in private modes",
            "accelerate shards on accelerators only, and would silently train whole copies. Remove "
            "it (on a CPU call torch.distributed.fsdp.fully_shard on the model, in a loop of your "
            "own with PrivateRun).",
        )
    if args.world_size > 1 and CLIPPED_GRADIENT_NORM in args.release:
        found.unsupported(
            "release",
            f"to be without {CLIPPED_GRADIENT_NORM!r} with {args.world_size} processes",
            "None of them has the whole sum before its noise. Launch one process, or remove it.",
        )
    if args.world_size > 1 and args.max_logical_batch_size is not None:
        found.unsupported(
            "max_logical_batch_size",
            f"to be None with {args.world_size} processes",
            "Each draws from rows of its own, so none knows when the whole draw is too large. "
            "Leave it unset, or launch one process.",
        )
    return found


def _processes_apart(args: Any, found: Problems) -> None:
    """Note processes that do not know of each other.

    Each would take itself for the only one, and release a model of its own from one budget.
    """
    launched = os.environ.get("WORLD_SIZE") or ("1" if args.world_size == 1 else None)
    if launched is not None and launched != str(args.world_size):
        found["WORLD_SIZE"] = invalid(
            "$WORLD_SIZE",
            launched,
            f"to be {args.world_size}, the number of processes that accelerate knows, in private "
            "modes",
            "Each process takes itself for the only one, and would release a model of its own from "
            "one budget. On a machine without accelerators, set use_cpu=True (use_cpu: true).",
            UnsupportedArgumentError,
        )
    # What `accelerate launch --cpu` sets for several processes, of which it starts only one.
    meant = {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes")
    if meant and on_cpu and "WORLD_SIZE" not in os.environ:
        found["num_processes"] = invalid(
            "--num_processes",
            "one process",
            "to start as many processes as it names, in private modes",
            "`accelerate launch --cpu` starts one process whatever `--num_processes` says. Use "
            "`torchrun --nproc_per_node 2` or `hf-dp train --num_processes 2`, with use_cpu=True "
            "where there is a GPU; for one process, leave `--num_processes` away and unset "
            "MASTER_ADDR.",
            UnsupportedArgumentError,
        )
