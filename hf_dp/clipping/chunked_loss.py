"""The loss of a language model without the logits of a batch.

A head of 128,000 tokens gives each position 128,000 logits, and cross-entropy holds them three
times over. Here the loss and its gradients are formed by blocks of the vocabulary, and backward
computes each block of logits again. Only the log of the sum of exponentials is kept, one number a
position:

    loss_t = lse_t - z_t[y_t],  lse_t = log sum_v exp z_t[v]
    d loss_t / d z_t[v] = exp(z_t[v] - lse_t) - [v = y_t]

That is one product more than the three of ordinary training. Numbers differ from those of
``torch.nn.functional.cross_entropy`` by rounding only.

A head that trains has one gradient an example. Where rows have as many positions as the head has
features, these are formed as they are. Where rows are shorter, they would take more than the
logits do, and :mod:`hf_dp.clipping.head_gradients` forms norms and sums by blocks instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_dp.clipping.gradients import Dense, of_units
from hf_dp.clipping.head_gradients import (
    HeadGradients,
    LeftGrams,
    LogitGradients,
    logits_by_blocks,
)
from hf_dp.clipping.products import outer_sums
from hf_dp.clipping.rounding import accumulation_dtype, full_precision, matmul_dtype
from hf_dp.clipping.tape import Tape, has_own_forward, tape_of
from hf_dp.errors import UnsupportedLossError


@dataclass
class HeadInput:
    """The input of a model's head.

    Attributes:
        hidden: (b, T, d), once the model has run.
        version: counts changes in place of ``hidden``, as it was at the head.
    """

    hidden: Tensor | None = None
    version: int = 0


def check_head(model: Any) -> nn.Linear:
    """Return the head of a language model.

    Raises: UnsupportedLossError for a head that is no plain linear layer, that has hooks or a
        forward of its own, or that FSDP2 shards.
    """
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
    """Return what the head got, (b, T, d).

    Raises: UnsupportedLossError if the model does more with its logits than to return them.
    """
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
    tape = tape_of(head)
    if tape is not None:
        tape.note_forward(head, "weight", "bias")
    loss: Tensor = _ChunkedLoss.apply(hidden, head.weight, head.bias, labels, (head, tape, ignored))
    return loss


def _unsupported(why: str) -> UnsupportedLossError:
    return UnsupportedLossError(
        f"`chunked_loss` needs a language model whose logits are a linear layer of its last hidden "
        f"states, in one piece, but {why}. Set chunked_loss=False."
    )


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
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
        share = labeled.to(lse.dtype) / labeled.sum(1, keepdim=True).clamp_min(1)
        losses = (lse - target[..., 0]).masked_fill_(~labeled, 0).mul_(share).sum(1)
        ctx.save_for_backward(hidden, weight, bias, labels, lse, share)
        return losses

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, lse, share = ctx.saved_tensors
        (needs_hidden, needs_weight, needs_bias) = ctx.needs_input_grad[:3]
        scale, as_given = (grad_outputs[0][:, None] * share)[..., None], hidden.shape
        if ctx.tape is not None:  # every position is computed by itself: its unit's or example's
            rows = ctx.tape.rows_per_unit
            hidden, labels, lse, scale = (of_units(v, rows) for v in (hidden, labels, lse, scale))
        examples, vocabulary = len(hidden), len(weight)
        dtype = accumulation_dtype(hidden.dtype)
        logits = LogitGradients(hidden, weight, bias, labels, lse, scale)
        one_each = 1 if ctx.tape is None else examples
        # Explicit gradients of b examples take b V d numbers, and their logits b V T.
        by_blocks = needs_weight and ctx.tape is not None and hidden.shape[1] < hidden.shape[2]
        grad_hidden = torch.zeros_like(hidden, dtype=dtype) if needs_hidden else None
        of_weight = (
            hidden.new_empty(one_each, *weight.shape, dtype=dtype)
            if needs_weight and not by_blocks
            else None
        )
        of_bias = hidden.new_empty(one_each, vocabulary, dtype=dtype) if needs_bias else None
        grams = LeftGrams(hidden) if by_blocks else None
        squares = torch.zeros(labels.shape, dtype=dtype, device=hidden.device)
        for rows, grads in logits.by_blocks():
            squares += grads.to(dtype).square().sum(-1)
            if grams is not None:
                grams.add(grads)
            if grad_hidden is not None:
                grad_hidden += grads @ weight[rows].to(hidden.dtype)
            inputs = hidden
            if ctx.tape is None:
                grads, inputs = grads.flatten(0, 1)[None], hidden.flatten(0, 1)[None]
            if of_weight is not None:
                with full_precision():
                    of_weight[:, rows] = outer_sums(grads, inputs)
            if of_bias is not None:
                of_bias[:, rows] = grads.sum(1, dtype=dtype)
        back = None if grad_hidden is None else grad_hidden.to(ctx.dtype).view(as_given)
        if ctx.tape is None:
            formed = (of_weight, of_bias)
            kinds = (weight, bias)
            return (
                back,
                *(
                    None if each is None else each[0].to(kind.dtype)
                    for each, kind in zip(formed, kinds, strict=True)
                ),
                None,
                None,
            )
        if grams is not None:
            ctx.tape.capture(ctx.module, "weight", HeadGradients(logits, grams.total()), True)
        of_positions = squares.sqrt_()
        if of_weight is not None:
            inputs = torch.linalg.vector_norm(hidden, dim=2, dtype=dtype)
            size = torch.linalg.vecdot(of_positions, inputs)  # as that of outer products
            ctx.tape.capture(ctx.module, "weight", Dense(of_weight, True, size), True)
        if of_bias is not None:
            ctx.tape.capture(ctx.module, "bias", Dense(of_bias, True, of_positions.sum(1)), True)
        return back, None, None, None, None
