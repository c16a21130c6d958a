"""The largest physical batch that fits into the memory, found on made-up examples.

The size of a physical batch is memory only and never changes the clipped sum. It is written where
everyone can read it, though: a size that was found from private rows would be a function of them.
So lengths come from the caller or from the model, contents are made up, and what this process holds
(its rows may be among it) counts as free; see :func:`hf_dp.run.memory.left_by_others`.
"""

from __future__ import annotations

import gc
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from hf_dp import _validate
from hf_dp.batches.options import BatchOptions
from hf_dp.batches.structure import Example, column, combined, leaves, own
from hf_dp.errors import DataError, DoesNotFitError, UnsupportedArgumentError
from hf_dp.losses import base_model
from hf_dp.noise import untouched_generators
from hf_dp.run.memory import Tried, left_by_others, taken, try_on
from hf_dp.run.other_training import pay_for_step
from hf_dp.run.private_run import PrivateRun
from hf_dp.run.synthetic import synthetic_examples, takes_tokens

logger = logging.get_logger(__name__)

# The share of the memory that stays free: for allocators that cannot use every gap between batches
# of many shapes, for evaluation, and for other programs that grow.
MARGIN = 0.1
# By how much the answer may be below the largest size: as much as it matters, and fewer tries.
TOLERANCE = 0.05
# What Python and the libraries take on the CPU (0.4 GiB measured). It is assumed, not measured,
# since what was measured would hold the rows, too.
LIBRARIES = 2**29
_MIB = 2**20
_ANY_LENGTH = 10**9  # tokenizers without a limit name a larger number
_TOKENS = ("input_ids", "decoder_input_ids")

# Makes a step, on these physical batches, that draws nothing, releases nothing and keeps nothing.
# The optimizer is None where its state exists already.
Rehearse = Callable[[Sequence[Any], Any], None]


@dataclass(frozen=True)
class PhysicalSize:
    """The largest physical batch that fits.

    Attributes:
        examples: the most examples of a physical batch.
        tokens: the most tokens, padding included; None for inputs that are not tokens.
        length: tokens of the longest example that was thought of; None likewise.
        limit: the bytes that this process may take in all.
        tried: (examples, tokens of each or None, what came of it), in order.
    """

    examples: int
    tokens: int | None
    length: int | None
    limit: int
    tried: tuple[tuple[int, int | None, Tried], ...] = ()

    def of(self, options: BatchOptions) -> BatchOptions:
        """Return options with this size."""
        return replace(options, physical_batch_size=self.examples, max_tokens=self.tokens)


def largest_physical_batch(
    run: PrivateRun,
    rehearse: Rehearse,
    optimizer: Any,
    *,
    length: int | None = None,
    most_examples: int | None = None,
    most_tokens: int | None = None,
) -> PhysicalSize:
    """Return the largest physical batch whose private step fits, in all processes of the run.

    For token ids, the largest number of tokens is found on examples of full length, then the most
    examples among which these tokens may be divided. Neither is searched beyond what a draw of the
    plan may need. The rows are looked at only to refuse one that is longer than ``length``.

    Args:
        rehearse: makes the step, without drawing or releasing.
        optimizer: the run's; its state counts also before its first step.
        length: tokens of the longest row, labels of a sequence-to-sequence model likewise; None:
            what tokenizer and model take at most.
        most_examples, most_tokens: upper limits.

    Raises:
        InvalidArgumentError: ``length`` is not given, and neither tokenizer nor model names one; or
            the step fails on made-up examples.
        DoesNotFitError: not even one example fits.
        DataError: a row is longer than ``length``.
        UnsupportedArgumentError: a device other than CUDA and the CPU.
    """
    if run.device.type not in ("cuda", "cpu") or not hasattr(os, "fork"):
        raise UnsupportedArgumentError(
            "Expected a CUDA device, or the CPU of a system with processes that fork, to find the "
            f"physical batch that fits, got {run.device.type!r}. Set the size yourself."
        )
    length = longest_thought_of(run, length)
    most = _largest_draw(run)
    if most_examples is not None:
        most = min(most, most_examples)
    full = most
    if length is not None and most_tokens is not None:
        full = min(most, max(1, most_tokens // length))
    search = _Search(run, rehearse, optimizer, length)

    def find() -> tuple[int, int]:
        if not search.is_mine:
            return full, most
        examples = largest_that_fits(search.fits, full, tolerance=TOLERANCE)
        if examples == 0:
            raise search.nothing_fits()
        if length is None:
            return examples, examples
        # With n examples of T tokens, n T being given, the step takes about a n T + b n T^2 + c n
        # (activations, attention, gradients of one example each): the most at one end, the longest
        # or the shortest T. So what fits at both ends fits between them.
        divided = min(examples * length, most_tokens or sys.maxsize)
        return examples, largest_that_fits(
            lambda number: search.fits(number, divided // number),
            min(most, divided),
            known=examples,
            tolerance=TOLERANCE,
        )

    if length is not None:
        _refuse_longer_rows(run, length)
    examples, short = (-run.processes.largest(-each) for each in run.processes.together(find))
    found = PhysicalSize(
        examples=short,
        tokens=None if length is None else min(examples * length, most_tokens or sys.maxsize),
        length=length,
        limit=search.limit,
        tried=tuple(search.tried),
    )
    search.log(found)
    return found


def largest_that_fits(
    fits: Callable[[int], bool], limit: int = 1 << 16, *, known: int = 0, tolerance: float = 0.0
) -> int:
    """Return the largest size that fits: ``known`` if none above it does, ``limit`` if that does.

    The size is doubled until one does not fit, then the interval is halved. Every size between
    ``known`` and one that fits is assumed to fit.

    Args:
        known: a size that fits; 0 fits always.
        tolerance: by how much the answer may be too small, as a share of it.
    """
    low, high = known, max(1, 2 * known)
    while low < limit and fits(min(high, limit)):
        low, high = min(high, limit), 2 * high
    if low >= limit:
        return low
    high = min(high, limit)
    while high - low > max(1, tolerance * low):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def longest_thought_of(run: PrivateRun, length: int | None) -> int | None:
    """Return how many tokens an example may have: as given, else what tokenizer and model take;
    None for examples without tokens.

    Raises: InvalidArgumentError when none of them says, or for a length without tokens.
    """
    of_own = [_tokens_of(own(each)) for each in run.own_examples()]
    if not (any(of_own) if of_own else takes_tokens(run.model)):
        if length is not None:
            raise _validate.invalid(
                "auto_physical_batch_length",
                length,
                "to be None for examples without `input_ids`",
                "Remove it: made-up examples then have the size of the model's inputs, or that of "
                "the largest that DPTrainer.synthetic_batches(self) returns.",
            )
        return None
    if length is not None:
        return _validate.integer("auto_physical_batch_length", length, 1)
    tokenizer = run.processing_class or getattr(run.data_collator, "tokenizer", None)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    named = (getattr(tokenizer, "model_max_length", None), _positions(base_model(run.model)))
    known = [each for each in named if each is not None and each < _ANY_LENGTH]
    if not known:
        raise _validate.invalid(
            "auto_physical_batch_length",
            None,
            "to be given for a tokenizer and a model that name no largest number of tokens",
            "Set it to the number of tokens at which rows are truncated. It is not read from the "
            "rows: the size would then tell of them.",
        )
    return min(known)


class _Search:
    """Tries sizes, one after the other.

    Attributes: limit: in bytes. is_mine: whether this process searches; on a CPU that several
        share, one does.
    """

    def __init__(self, run: PrivateRun, rehearse: Rehearse, optimizer: Any, length: int | None):
        self.run, self.rehearse, self.length = run, rehearse, length
        self.optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        on_cpu = run.device.type == "cpu"
        here = 1 if run.processes.alone else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.is_mine = not on_cpu or here == 1 or os.environ.get("LOCAL_RANK", "0") == "0"
        gc.collect()  # what nobody refers to is not this run's
        self.limit = int((1 - MARGIN) * left_by_others(run.device, here if on_cpu else 1))
        self.needed = _held(run.model, self.optimizer) + (LIBRARIES if on_cpu else 0)
        self.tried: list[tuple[int, int | None, Tried]] = []

    def fits(self, examples: int, length: int | None = None) -> bool:
        """Return whether a step fits that holds the sums of one example and meets a physical batch
        of ``examples``."""
        length = length or self.length
        most = self.limit - self.needed
        with untouched_generators(), ExitStack() as after:
            if self.run.device.type != "cpu":  # elsewhere a child process makes the step
                after.enter_context(_unchanged(self.run.model, self.optimizer))
            example = _made_up(self.run, length)
            batches = [_repeated(example, number) for number in (1, examples)]
            optimizer = None if self.optimizer.state else self.optimizer
            tried = try_on(self.run.device, lambda: self._step(batches, optimizer), most)
        if tried.error:
            raise _validate.invalid(
                "auto_physical_batch_length",
                self.length,
                f"to be a length that the model takes: a step on {examples} made-up examples "
                f"failed ({tried.error})",
                "Set it to the number of tokens at which rows are truncated. If model or loss need "
                "columns of your own, override DPTrainer.synthetic_batches(self).",
            )
        fits = tried.bytes is not None and tried.bytes <= most
        self.tried.append((examples, length, tried))
        logger.info("Physical batch: %s %s.", self._words(-1), "fits" if fits else "is too large")
        return fits

    def _step(self, batches: Sequence[Any], optimizer: Any) -> None:
        self.run.model.train()
        self.rehearse(batches, optimizer)

    def nothing_fits(self) -> DoesNotFitError:
        """Return the error for a search in which not even one example fits."""
        return DoesNotFitError(
            f"A private step does not fit into memory: {self._words(-1)}, beside "
            f"{self.needed / _MIB:,.0f} MiB of weights, optimizer state and libraries, and this "
            f"process may take {self.limit / _MIB:,.0f} MiB on {self.run.device} ({MARGIN:.0%} of "
            "what other programs leave stays free). Truncate rows and set "
            "auto_physical_batch_length accordingly, set gradient_checkpointing=True, or train "
            "fewer parameters with peft_config."
        )

    def log(self, found: PhysicalSize) -> None:
        """Log what was chosen, and warn when this process holds much that was not counted."""
        tokens = "" if found.tokens is None else f" and {found.tokens:,} tokens"
        logger.info(
            "Physical batch: up to %d examples%s, found in %d tries for %s; %.0f MiB may be taken.",
            found.examples,
            tokens,
            len(found.tried),
            "examples of one size" if found.length is None else f"{found.length} tokens an example",
            found.limit / _MIB,
        )
        held = taken() if self.run.device.type == "cpu" else 0
        if held > self.needed + MARGIN * self.limit:
            logger.warning(
                "This process holds %.0f MiB, of which %.0f MiB were expected (weights, optimizer, "
                "libraries). The rest, rows held in memory perhaps, is not counted in the physical "
                "batch, which must not depend on rows. If memory runs out, keep rows in a "
                "datasets.Dataset, or set per_device_train_batch_size.",
                held / _MIB,
                self.needed / _MIB,
            )

    def _words(self, which: int) -> str:
        examples, length, tried = self.tried[which]
        of = "" if length is None else f" of {length} token{'s' * (length != 1)}"
        took = tried.ended if tried.bytes is None else f"took {tried.bytes / _MIB:,.0f} MiB"
        return f"{examples} example{'s' * (examples != 1)}{of} ({took})"


@contextmanager
def _unchanged(model: nn.Module, optimizer: Any) -> Iterator[None]:
    """Put weights, buffers, modes and the state of the optimizer back after a step inside."""
    kept = [p for p in model.parameters() if p.requires_grad] + list(model.buffers())
    copies = [tensor.detach().to("cpu", copy=True) for tensor in kept]
    modes = [(module, module.training) for module in model.modules()]
    groups = [dict(group) for group in optimizer.param_groups]
    had_state = bool(optimizer.state)
    pay_for_step(model)
    try:
        yield
    finally:
        for tensor, copy in zip(kept, copies, strict=True):
            tensor.data.copy_(copy)
        for module, mode in modes:
            module.training = mode
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)
        if not had_state:
            optimizer.state.clear()
        optimizer.zero_grad(set_to_none=True)


def _made_up(run: PrivateRun, length: int | None) -> Example:
    """Return a batch of one made-up example of this length."""
    if not run.has_own_examples:
        (example,) = synthetic_examples(run.model, (length or 1,), (length or 1,))
        return own(example)
    example = max(map(own, run.own_examples()), key=_numbers_in)
    return example if length is None else _stretched(example, length, base_model(run.model))


def _tokens_of(example: Example) -> int:
    tokens = example.get("input_ids") if isinstance(example, dict) else None
    return tokens.shape[-1] if isinstance(tokens, Tensor) else 0


def _numbers_in(example: Example) -> int:
    return sum(leaf.numel() for _, leaf in leaves(example) if isinstance(leaf, Tensor))


def _stretched(example: Example, length: int, base: Any) -> Example:
    """Repeat the tokens of an example, and what is as long, up to this length."""
    tokens = _tokens_of(example)
    targets = getattr(getattr(base, "config", None), "is_encoder_decoder", False)

    def stretch(name: str, values: list[Any]) -> Any:
        (leaf,) = values
        if not isinstance(leaf, Tensor) or leaf.dim() < 2:
            return leaf
        of_target = targets and column(name) in ("labels", *_TOKENS)
        if leaf.shape[-1] != tokens and not of_target:
            return leaf
        return leaf[..., torch.arange(length) % leaf.shape[-1]]

    return combined([example], stretch)


def _repeated(example: Example, times: int) -> Any:
    """Return a batch of so many equal examples."""

    def repeat(name: str, values: list[Any]) -> Any:
        (leaf,) = values
        if isinstance(leaf, Tensor):
            return leaf.repeat(times, *[1] * (leaf.dim() - 1))
        return leaf * times if isinstance(leaf, list) else leaf

    return combined([example], repeat)


def _refuse_longer_rows(run: PrivateRun, length: int) -> None:
    """Raise DataError when a row has more tokens than were thought of."""
    targets = getattr(getattr(base_model(run.model), "config", None), "is_encoder_decoder", False)
    names = (*_TOKENS, "labels") if targets else _TOKENS
    for name, leaf in run.training_data().looked_over.layout.leaves.items():
        if column(name) in names and len(leaf.most) > 1 and leaf.most[-1] > length:
            raise DataError(
                f"`{name}` of a row has {leaf.most[-1]} tokens, and the physical batch that fits "
                f"is to be found for at most {length} (auto_physical_batch_length, or what "
                "tokenizer and model take). Truncate the rows, or raise it."
            )


def _largest_draw(run: PrivateRun) -> int:
    """Return how many examples this process hardly ever draws more of: six standard deviations
    above the expected number."""
    plan = run.plan
    expected = plan.expected_batch_size / run.processes.count
    return min(plan.drawn_from, math.ceil(expected + 6 * math.sqrt(expected)))


def _held(model: nn.Module, optimizer: Any) -> int:
    """Return the bytes of weights, buffers and the optimizer's state."""
    state = [
        value
        for of_parameter in optimizer.state.values()
        for value in of_parameter.values()
        if isinstance(value, Tensor)
    ]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers(), *state)
    }
    return sum(storages.values())


def _positions(base: Any) -> int | None:
    """Return how many tokens a model has positions for; None where it does not say."""
    for name, module in base.named_modules():
        if column(name) == "position_embeddings" and isinstance(module, nn.Embedding):
            # RoBERTa counts positions from the padding token on.
            offset = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - offset
    positions = getattr(getattr(base, "config", None), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None
