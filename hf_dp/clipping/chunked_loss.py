"""The loss of a language model, and the gradients of its head, without the logits of a batch.

A head of 128,000 tokens gives each position 128,000 logits, and cross-entropy holds them three
times over. Here the loss and its gradients are formed by blocks of the vocabulary, and backward
computes each block of logits again. Only the log of the sum of exponentials is kept, one number a
position:

    loss_t = lse_t - z_t[y_t],  lse_t = log sum_v exp z_t[v]
    d loss_t / d z_t[v] = exp(z_t[v] - lse_t) - [v = y_t]

That is one product more than the three of ordinary training. Numbers differ from those of
``torch.nn.functional.cross_entropy`` by rounding only.

A head that trains has one gradient an example, ``G_i = sum_t left_t right_t^T``, with left_t the
gradient of the logits of position t, V numbers, and right_t the head's input. Where rows have as
many positions as the head has features, these are formed as they are. Where rows are shorter, they
would take more than the logits do, and left factors are never held (:class:`HeadGradients`): each
block of the vocabulary is formed again from the input, whenever it is needed. Their Gram matrices
are sums over blocks, so norms need one pass, which is that of the backward pass; the weighted sum
needs another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from hf_dp.clipping.gradients import Dense, OuterProducts, PerExampleGradient, Weights, of_units
from hf_dp.clipping.rounding import (
    GramPair,
    Grams,
    Norms,
    accumulation_dtype,
    dots,
    full_precision,
    matmul_dtype,
    norms_from_grams,
    outer_sums,
)
from hf_dp.clipping.tape import Context, Tape, has_own_forward, tape_of
from hf_dp.errors import UnsupportedLossError

# Tokens in a block. It must not depend on the batch: in bfloat16 each block's product is rounded,
# so an example's gradient would depend on how many others are beside it.
_WIDTH = 4096


@dataclass
class _Block:
    """Logits of some tokens, (b, T, width), and where the labels lie among them."""

    rows: slice
    logits: Tensor
    index: Tensor  # (b, T, 1), inside the block also for labels outside
    inside: Tensor  # (b, T, 1)


def logits_by_blocks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, wanted: slice | None = None
) -> Iterator[_Block]:
    """Yield the logits of one block of tokens after the other; only those with wanted tokens. They
    are the same numbers each time, whatever autocast or TF32 setting surrounds the call: what is
    added to a sum must be what was measured."""
    vocabulary = len(weight)
    for start in range(0, vocabulary, _WIDTH):
        rows = slice(start, min(start + _WIDTH, vocabulary))
        if wanted is not None and (rows.stop <= wanted.start or wanted.stop <= rows.start):
            continue
        of_bias = None if bias is None else bias[rows].to(hidden.dtype)
        with torch.autocast(hidden.device.type, enabled=False), full_precision():
            logits = F.linear(hidden, weight[rows].to(hidden.dtype), of_bias)
        index = (labels - start)[..., None]
        inside = (index >= 0) & (index < rows.stop - start)
        index = index.clamp(0, rows.stop - start - 1)
        yield _Block(rows, logits.to(accumulation_dtype(hidden.dtype)), index, inside)


@dataclass
class HeadGradients(PerExampleGradient):
    """Sums of outer products whose left factors, the gradients of logits, are formed again by
    blocks of the vocabulary."""

    hidden: Tensor  # the head's inputs and right factors, (b, T, d)
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    lse: Tensor  # log of the sum of exponentials, (b, T)
    scale: Tensor  # what each position's loss counts, (b, T, 1); 0 where nothing is predicted
    gram: Tensor  # the left factors' Gram matrices, (b, T, T)
    keep: Tensor | None = None

    def by_blocks(self, wanted: slice | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows of the vocabulary with the gradients of their logits, (b, T, rows)."""
        unlabeled = self.scale == 0
        for block in logits_by_blocks(self.hidden, self.weight, self.bias, self.labels, wanted):
            grads = block.logits.sub_(self.lse[..., None]).exp_()
            grads.scatter_add_(-1, block.index, -block.inside.to(grads.dtype))
            grads.mul_(self.scale).masked_fill_(unlabeled, 0)
            # As in a backward pass under autocast: rounded, once, to what the products take.
            yield block.rows, grads.to(self.hidden.dtype)

    def fits(self, shape: torch.Size, examples: int) -> bool:
        return shape == self.weight.shape and len(self.gram) == examples

    def factors(self, wanted: slice | None = None) -> Iterator[tuple[slice, OuterProducts]]:
        """Yield rows of the weight with the outer products that make their gradients."""
        for rows, left in self.by_blocks(wanted):
            part = OuterProducts(left, self.hidden)
            if self.keep is not None:
                part.keep_only(self.keep)
            yield rows, part

    def norms(self, grams: Grams | None = None) -> Norms:
        of_right = dots(self.hidden, self.hidden, accumulation_dtype(self.hidden.dtype))
        pair = GramPair([self.gram.clone()], [of_right], max(self.weight.shape))
        return norms_from_grams([pair])[0]

    def add_weighted_sum(self, total: Tensor, weights: Weights) -> None:
        for rows, part in self.factors():
            part.add_weighted_sum(total[rows], weights)

    def size(self) -> Tensor:
        right = torch.linalg.vector_norm(self.hidden, dim=2, dtype=self.gram.dtype)
        return torch.linalg.vecdot(self._left_norms(), right)

    def _left_norms(self) -> Tensor:
        return self.gram.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()

    def left_at(self, tokens: Tensor) -> Tensor:
        """Return the left factors at some tokens of each example, (b, T, S), for tokens (b, S)."""
        index = tokens[:, None, :].expand(-1, self.gram.shape[1], -1)
        found = torch.zeros(index.shape, dtype=self.gram.dtype, device=self.gram.device)
        for rows, part in self.factors():
            inside = (index >= rows.start) & (index < rows.stop)
            picked = part.left.gather(2, (index - rows.start).clamp(0, part.left.shape[2] - 1))
            found = torch.where(inside, picked.to(found.dtype), found)
        return found

    def block(self, examples: slice, rows: slice, dtype: torch.dtype) -> Tensor:
        blocks = []
        for here, part in self.factors(rows):  # of all examples, so that the numbers are the same
            start, stop = max(here.start, rows.start), min(here.stop, rows.stop)
            inside = slice(start - here.start, stop - here.start)
            blocks.append(part.block(examples, inside, dtype))
        return torch.cat(blocks, 1)

    def fingerprint(self) -> Tensor:
        left = torch.linalg.vector_norm(self._left_norms(), dim=1)
        return left * torch.linalg.vector_norm(self.hidden, dim=(1, 2))

    def keep_only(self, keep: Tensor) -> None:
        self.keep = keep if self.keep is None else self.keep & keep


@dataclass
class HeadInput:
    """The input (b, T, d) of a head, once it has run, and its count of changes in place then."""

    hidden: Tensor | None = None
    version: int = 0


def check_head(model: nn.Module) -> nn.Linear:
    """Return the head of a language model: a plain linear layer, neither changed nor sharded."""
    find = getattr(model, "get_output_embeddings", None)
    head = None if find is None else find()
    if type(head) is not nn.Linear:
        raise _unsupported(
            f"the head of {type(model).__name__} is a {type(head).__module__}.{type(head).__name__}"
        )
    if isinstance(head.weight, DTensor):
        raise _unsupported("the head's weight is spread over processes")
    if head._forward_hooks or head._forward_pre_hooks or has_own_forward(head):
        raise _unsupported("the head has hooks or a forward of its own")
    return head


@contextmanager
def without_logits(head: nn.Linear) -> Iterator[HeadInput]:
    """Let the head return its input inside, and note it."""
    found = HeadInput()
    previous = head.__dict__.get("forward")

    def pass_on(input: Tensor) -> Tensor:
        found.hidden, found.version = input, input._version
        return input

    object.__setattr__(head, "forward", pass_on)
    try:
        yield found
    finally:
        if previous is None:
            del head.__dict__["forward"]
        else:
            object.__setattr__(head, "forward", previous)


def check_output(model: nn.Module, found: HeadInput, logits: object) -> Tensor:
    """Return what the head got, (b, T, d); the model must return its logits as they are."""
    hidden = found.hidden
    passed_on = isinstance(logits, Tensor) and hidden is not None
    if passed_on and logits is not hidden:  # accelerate returns 16 bits as 32
        assert isinstance(logits, Tensor) and hidden is not None
        widened = logits.dtype != hidden.dtype and logits.shape == hidden.shape
        passed_on = widened and torch.equal(logits, hidden.to(logits.dtype))
    if not passed_on or hidden is None or hidden._version != found.version:
        raise _unsupported(
            f"{type(model).__name__} changes its logits after the head (a scale or a soft cap)"
        )
    return hidden


def chunked_loss(head: nn.Linear, hidden: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """Return each example's mean cross-entropy over its labeled positions, (b,); 0 without any.

    Args:
        hidden: the head's inputs, (b, T, d).
        labels: (b, T); ``ignored`` where nothing is predicted.
    """
    losses, labeled = token_losses(head, hidden, labels, ignored), labels != ignored
    share = labeled.to(losses.dtype) / labeled.sum(1, keepdim=True).clamp_min(1)
    return losses.mul(share).sum(1)


def token_losses(head: nn.Linear, hidden: Tensor, labels: Tensor, ignored: int = -100) -> Tensor:
    """Return each position's cross-entropy, (b, T); 0 where the label is ``ignored``.

    Args: as of :func:`chunked_loss`.
    """
    tape = tape_of(head)
    if tape is not None:
        tape.note_forward(head, "weight", "bias")
    losses: Tensor = _TokenLosses.apply(
        hidden, head.weight, head.bias, labels, (head, tape, ignored)
    )
    return losses


def _unsupported(why: str) -> UnsupportedLossError:
    return UnsupportedLossError(
        "`chunked_loss`, and label words of several tokens, need a language model whose logits are "
        f"a linear layer of its last hidden states, in one piece, but {why}. Set "
        "chunked_loss=False, or choose label words of one token."
    )


class _LossContext(Context, Protocol):
    module: nn.Linear
    tape: Tape | None
    dtype: torch.dtype


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _LossContext,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        call: tuple[nn.Linear, Tape | None, int],
    ) -> Tensor:
        ctx.module, ctx.tape, ignored = call
        ctx.dtype = hidden.dtype
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(matmul_dtype(hidden))
        labeled = labels != ignored
        # As cross-entropy does, fail for a label that is no token.
        weight.new_empty(1).expand(len(weight)).gather(0, labels.masked_fill(~labeled, 0).flatten())
        lse: Tensor | None = None
        target: Tensor | None = None
        for block in logits_by_blocks(hidden, weight, bias, labels):
            of_block = block.logits.logsumexp(-1)
            picked = block.logits.gather(-1, block.index)
            lse = of_block if lse is None else torch.logaddexp(lse, of_block)
            target = picked if target is None else torch.where(block.inside, picked, target)
        assert lse is not None and target is not None
        ctx.save_for_backward(hidden, weight, bias, labels, lse, labeled)
        return (lse - target[..., 0]).masked_fill_(~labeled, 0)

    @staticmethod
    def backward(ctx: _LossContext, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, lse, labeled = ctx.saved_tensors
        tape = ctx.tape
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        scale, as_given = (grad_outputs[0] * labeled)[..., None], hidden.shape
        if tape is not None:  # every position is computed by itself: its unit's or example's
            unit = tape.rows_per_unit
            hidden, labels, lse, scale = (of_units(v, unit) for v in (hidden, labels, lse, scale))
        dtype = accumulation_dtype(hidden.dtype)
        # Explicit gradients of b examples take b V d numbers, and their logits b V T.
        by_blocks = needs_weight and tape is not None and hidden.shape[1] < hidden.shape[2]
        count = 1 if tape is None else len(hidden)
        new = partial(torch.empty, dtype=dtype, device=hidden.device)
        grad_hidden = torch.zeros_like(hidden, dtype=dtype) if needs_hidden else None
        of_weight = new(count, *weight.shape) if needs_weight and not by_blocks else None
        of_bias = new(count, len(weight)) if needs_bias else None
        # Hundreds of blocks: the sum of their Gram matrices must not lose what each of them has.
        gram = new(*labels.shape, labels.shape[1] * by_blocks, dtype=torch.float64).zero_()
        head = HeadGradients(hidden, weight, bias, labels, lse, scale, gram)
        squares = torch.zeros(labels.shape, dtype=dtype, device=hidden.device)
        for rows, grads in head.by_blocks():
            squares += grads.to(dtype).square().sum(-1)
            if grad_hidden is not None:
                grad_hidden += grads @ weight[rows].to(hidden.dtype)
            inputs = hidden
            if tape is None:
                grads, inputs = grads.flatten(0, 1)[None], hidden.flatten(0, 1)[None]
            with full_precision():
                if by_blocks:
                    gram += dots(grads, grads, dtype)
                if of_weight is not None:
                    of_weight[:, rows] = outer_sums(grads, inputs)
            if of_bias is not None:
                of_bias[:, rows] = grads.sum(1, dtype=dtype)
        back = None if grad_hidden is None else grad_hidden.to(ctx.dtype).view(as_given)
        if tape is None:
            plain = [
                None if each is None else each[0].to(kind.dtype)
                for each, kind in ((of_weight, weight), (of_bias, bias))
            ]
            return back, *plain, None, None
        of_positions = squares.sqrt_()
        if by_blocks:
            head.gram = gram.to(dtype)
            tape.capture(ctx.module, "weight", head, True)
        if of_weight is not None:
            inputs = torch.linalg.vector_norm(hidden, dim=2, dtype=dtype)
            size = torch.linalg.vecdot(of_positions, inputs)  # as that of outer products
            tape.capture(ctx.module, "weight", Dense(of_weight, True, size), True)
        if of_bias is not None:
            tape.capture(ctx.module, "bias", Dense(of_bias, True, of_positions.sum(1)), True)
        return back, None, None, None, None
