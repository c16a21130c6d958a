"""The largest physical batch that fits into a GPU, found on synthetic examples.

The size of a physical batch is memory only and never changes the clipped sum. It is written where
everyone can read it, though: a size that was found from private rows would be a function of them.
So the length comes from the caller, and contents are made up. What else lies on the GPU is weights
and optimizer; rows are there only while a step runs. In the memory of a CPU the rows may lie
themselves, and what is left of it tells of them: there the size is set by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.optim import Optimizer

from hf_dp import _validate
from hf_dp.batches.loader import length_of
from hf_dp.batches.structure import Batch, Example, column, combined, numbers, own
from hf_dp.clipping.self_check import in_training
from hf_dp.errors import (
    DataError,
    DoesNotFitError,
    MemoryShortError,
    UnsupportedArgumentError,
    is_out_of_memory,
)
from hf_dp.noise import untouched_generators
from hf_dp.run.other_training import pay_for_step
from hf_dp.run.private_run import PrivateRun
from hf_dp.run.synthetic import synthetic_examples

MARGIN = 0.1  # of the memory stays free: for gaps between batches of many shapes, and evaluation
LENGTH = "auto_physical_batch_length"

# Makes a step, on these physical batches, that draws nothing, releases nothing and keeps nothing.
# The optimizer is None where its state exists already.
Rehearse = Callable[[Sequence[Batch], Optimizer | None], None]


def largest_physical_batch(
    run: PrivateRun,
    rehearse: Rehearse,
    optimizer: Any,
    *,
    length: int | None = None,
    most_examples: int | None = None,
) -> int:
    """Return how many examples of full length a private step fits with, in each of the processes.

    The search starts at what a draw hardly ever exceeds, six standard deviations above the expected
    number, and goes down by a tenth. Rows are looked at only to refuse one that is longer.

    Args:
        optimizer: the run's; its state counts also before its first step.
        length: tokens of the longest row; None for examples without tokens.

    Raises: UnsupportedArgumentError where there is no GPU; InvalidArgumentError when ``length`` is
        missing, or the step fails; DataError for a longer row; DoesNotFitError.
    """
    _kept_free(run.device)
    example = _made_up_example(run, length)
    # As long as rows are below float32, where each is padded by itself.
    pad = run.padding().alone if run.precision().is_short else lambda batch: batch
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    expected = run.plan.expected_batch_size / run.processes.count
    most = min(math.ceil(expected + 6 * math.sqrt(expected)), run.plan.drawn_from)

    def fits(examples: int) -> bool:
        """Try a step that holds the sums of one example and meets a batch of so many."""
        try:
            with untouched_generators(), _unchanged(run.model, optimizer), in_training(run.model):
                _spare = _kept_free(run.device)
                batches = [pad(_batch(example, each, length)) for each in (1, examples)]
                rehearse(batches, None if optimizer.state else optimizer)
            return True
        except Exception as problem:
            if is_out_of_memory(problem):
                return False
            raise _validate.invalid(
                LENGTH,
                length,
                f"to be a length that the model takes: a step on {examples} synthetic examples "
                f"failed ({type(problem).__name__}: {problem})",
                "If model or loss need columns of your own, override "
                "DPTrainer.synthetic_batches(self).",
            ) from problem

    def find() -> int:
        size = min(most, most_examples or most)
        while size and not fits(size):
            clear_device_cache(garbage_collection=True)
            size = int(0.9 * size)
        if size:
            return size
        raise DoesNotFitError(
            f"A private step of 1 example of {length or 'one'} token(s) does not fit into the "
            f"memory of {run.device}, of which {MARGIN:.0%} stays free. Truncate rows and set "
            f"{LENGTH} accordingly, set gradient_checkpointing=True, or train fewer parameters "
            "with peft_config."
        )

    return -run.processes.largest(-run.processes.together(find))  # the smallest in any process


def _made_up_example(run: PrivateRun, length: int | None) -> Example:
    """Return an example to try steps with, after a look at whether all rows are of at most this
    length. Raises: InvalidArgumentError when it is missing; DataError for a longer row."""
    with untouched_generators():
        made_up = run.engine_check.own_examples() or synthetic_examples(run.model)
    example = max(map(own, made_up), key=numbers)
    if (length is None) == bool(length_of(example)):
        raise _validate.invalid(
            LENGTH,
            length,
            "to be the number of tokens at which rows are truncated, or None for examples without",
            "Set it: if the length were read from the rows, the size would reveal it.",
        )
    for name, leaf in run.training_data().looked_over.layout.leaves.items():
        of_tokens = column(name).endswith("input_ids") or (name == "labels" and leaf.varying)
        if length is not None and of_tokens and leaf.most[-1] > length:
            raise DataError(
                f"`{name}` of a row has {leaf.most[-1]} tokens, but the physical batch that fits "
                f"is searched for at {length} ({LENGTH}). Truncate the rows, or raise it."
            )
    return example


def _kept_free(device: torch.device) -> Tensor:
    """Return a tensor as large as what shall stay free. Raises: UnsupportedArgumentError."""
    if device.type != "cuda":
        raise UnsupportedArgumentError(
            "Expected `auto_physical_batch_size` to be False without a CUDA device, got True on "
            f"{device.type!r}: what is left of this memory depends on the rows in it. Set "
            "`per_device_train_batch_size` or `max_tokens_per_physical_batch` yourself."
        )
    free, total = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    left = min(free + torch.cuda.memory_reserved(device), share * total)
    return torch.empty(int(MARGIN * left), dtype=torch.uint8, device=device)


@contextmanager
def _unchanged(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Put weights, buffers and the state of the optimizer back after a step inside."""
    kept = [p for p in model.parameters() if p.requires_grad] + list(model.buffers())
    copies = [tensor.detach().to("cpu", copy=True) for tensor in kept]
    groups = [dict(group) for group in optimizer.param_groups]
    had_state = bool(optimizer.state)
    pay_for_step(model)
    try:
        yield
    finally:
        for tensor, copy in zip(kept, copies, strict=True):
            tensor.data.copy_(copy)
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)
        if not had_state:
            optimizer.state.clear()
        optimizer.zero_grad(set_to_none=True)


def _batch(example: Example, examples: int, length: int | None) -> Batch:
    """Repeat a synthetic example, and in it what is as long as its tokens up to ``length``."""
    tokens = length_of(example)

    def made(name: str, values: list[Example]) -> Example:
        (leaf,) = values
        if not isinstance(leaf, Tensor):
            return leaf * examples if isinstance(leaf, list) else leaf
        of_target = column(name) in ("labels", "decoder_input_ids") and not leaf.is_floating_point()
        if length is not None and leaf.dim() > 1 and (of_target or leaf.shape[-1] == tokens):
            leaf = leaf[..., torch.arange(length) % leaf.shape[-1]]
        return leaf.repeat(examples, *[1] * (leaf.dim() - 1))

    return combined([example], made)


# -- memory that runs out --


@contextmanager
def named_memory_errors() -> Iterator[None]:
    """Raise MemoryShortError when memory runs out inside."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryShortError(
            "Memory ran out while a logical batch was computed. Nothing of its step is released, "
            "and it costs nothing (with random allocation, its epoch was recorded when that "
            "began). Set `auto_physical_batch_size=True` (on a GPU), or lower "
            "`per_device_train_batch_size` or set `max_tokens_per_physical_batch`: all change "
            "memory and speed, never the guarantee."
        ) from error
