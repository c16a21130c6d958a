"""The largest physical batch that fits into a GPU, found on made-up examples.

The size of a physical batch is memory only and never changes the clipped sum. It is written where
everyone can read it, though: a size that was found from private rows would be a function of them.
So lengths come from the caller or from the model, and contents are made up. What else lies on the
GPU is weights and optimizer; rows are there only while a step runs. In the memory of a CPU the rows
may lie themselves, and what is left of it tells of them: there the size is set by hand.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils import find_executable_batch_size
from torch import Tensor, nn
from transformers.utils import logging

from hf_dp import _validate
from hf_dp.batches.loader import BatchOptions
from hf_dp.batches.structure import Example, column, combined, leaves, own
from hf_dp.errors import DataError, DoesNotFitError, UnsupportedArgumentError
from hf_dp.losses import base_model
from hf_dp.noise import untouched_generators
from hf_dp.run.memory import is_out_of_memory
from hf_dp.run.other_training import pay_for_step
from hf_dp.run.private_run import PrivateRun
from hf_dp.run.synthetic import synthetic_examples, takes_tokens

logger = logging.get_logger(__name__)

# The share of the memory that stays free: for allocators that cannot use every gap between batches
# of many shapes, for evaluation, and for other programs that grow.
MARGIN = 0.1
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
    """

    examples: int
    tokens: int | None

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
    examples among which these tokens may be divided. Both start at what a draw of the plan may
    need, and become smaller by a tenth (``accelerate.utils.find_executable_batch_size``). The rows
    are looked at only to refuse one that is longer than ``length``.

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
        UnsupportedArgumentError: the device is no GPU.
    """
    if not _on_gpu(run):
        raise UnsupportedArgumentError(
            "Expected `auto_physical_batch_size` to be False without a CUDA device, got True on "
            f"{run.device.type!r}: what is left of this memory depends on the rows in it. Set "
            "`per_device_train_batch_size` or `max_tokens_per_physical_batch` yourself."
        )
    length = longest_thought_of(run, length)
    if length is not None:
        _refuse_longer_rows(run, length)
    most = min(_largest_draw(run), most_examples or sys.maxsize)
    limit = most_tokens or sys.maxsize

    def find() -> tuple[int, int]:
        search = _Search(run, rehearse, optimizer, length)
        if length is None:
            examples = search.largest(most)
            return examples, examples
        full = search.largest(min(most, max(1, limit // length)))
        # With n examples of T tokens, n T being given, the step takes about a n T + b n T^2 + c n
        # (activations, attention, gradients of one example each): the most at one end, the longest
        # or the shortest T. So what fits at both ends fits between them.
        divided = min(full * length, limit)
        return full, search.largest(min(most, divided), divided)

    # All processes use the smallest numbers that one of them found.
    full, examples = (-run.processes.largest(-each) for each in run.processes.together(find))
    found = PhysicalSize(examples, None if length is None else min(full * length, limit))
    tokens = "" if found.tokens is None else f" and {found.tokens:,} tokens"
    logger.info("Physical batch: up to %d examples%s fit.", found.examples, tokens)
    return found


def _on_gpu(run: PrivateRun) -> bool:
    return run.device.type == "cuda"


class _Search:
    """Tries whole steps on made-up examples of one length."""

    def __init__(self, run: PrivateRun, rehearse: Rehearse, optimizer: Any, length: int | None):
        self.run, self.rehearse, self.length = run, rehearse, length
        self.optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it

    def largest(self, most: int, tokens: int | None = None) -> int:
        """Return the most examples of which a step fits: of full length, or that have so many
        ``tokens`` together."""

        def step(examples: int) -> int:
            # Outside the handler of the error, whose frames hold the tensors of the step.
            if not self._fits(examples, self.length if tokens is None else tokens // examples):
                raise RuntimeError("CUDA out of memory.")  # as find_executable_batch_size reads it
            return examples

        try:
            found: int = find_executable_batch_size(step, starting_batch_size=most)()
        except RuntimeError as problem:
            if "No executable batch size found" not in str(problem):
                raise
            raise DoesNotFitError(
                f"A private step of 1 example of {self.length or 'one'} token(s) does not fit into "
                f"the memory of {self.run.device}, of which {MARGIN:.0%} stays free. Truncate rows "
                "and set auto_physical_batch_length accordingly, set gradient_checkpointing=True, "
                "or train fewer parameters with peft_config."
            ) from problem
        return found

    def _fits(self, examples: int, length: int | None) -> bool:
        """Return whether a step fits that holds the sums of one example and meets a physical batch
        of ``examples``."""
        optimizer = None if self.optimizer.state else self.optimizer
        try:
            with untouched_generators(), _unchanged(self.run.model, self.optimizer):
                example = _made_up(self.run, length)
                batches = [_repeated(example, number) for number in (1, examples)]
                _spare = _kept_free(self.run.device)
                self.run.model.train()
                self.rehearse(batches, optimizer)
            return True
        except Exception as problem:
            if is_out_of_memory(problem):
                return False
            raise _validate.invalid(
                "auto_physical_batch_length",
                self.length,
                f"to be a length that the model takes: a step on {examples} made-up examples "
                f"failed ({type(problem).__name__}: {problem})",
                "Set it to the number of tokens at which rows are truncated. If model or loss need "
                "columns of your own, override DPTrainer.synthetic_batches(self).",
            ) from problem


def _kept_free(device: torch.device) -> Tensor:
    """Return a tensor as large as what shall stay free."""
    left = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return torch.empty(int(MARGIN * left), dtype=torch.uint8, device=device)


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


def _positions(base: Any) -> int | None:
    """Return how many tokens a model has positions for; None where it does not say."""
    for name, module in base.named_modules():
        if column(name) == "position_embeddings" and isinstance(module, nn.Embedding):
            # RoBERTa counts positions from the padding token on.
            offset = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - offset
    positions = getattr(getattr(base, "config", None), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None
