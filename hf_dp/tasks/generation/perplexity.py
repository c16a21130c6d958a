"""Perplexity of the targets: how many tokens a model is in doubt between, on average."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hf_dp.losses import number_of_targets, per_example_loss


def negative_log_likelihood(
    model: Any, collate: Any, examples: Sequence[dict[str, Any]], batch_size: int
) -> tuple[float, int]:
    """Return the sum over all labeled tokens of -ln p(token), and the number of these tokens.

    Args:
        collate: the task's data collator, which pads.
        examples: encoded rows.
    """
    total, count = 0.0, 0
    device, training = next(model.parameters()).device, model.training
    order = sorted(range(len(examples)), key=lambda i: len(examples[i]["input_ids"]))
    try:
        model.eval()
        with torch.no_grad():
            for at in range(0, len(order), batch_size):
                batch = collate([examples[i] for i in order[at : at + batch_size]])
                inputs = {name: value.to(device) for name, value in batch.items()}
                tokens = number_of_targets(model, inputs)
                losses = per_example_loss(model, inputs).double().cpu()  # means over these tokens
                total += float(losses @ tokens.double().cpu())
                count += int(tokens.sum())
    finally:
        model.train(training)
    return total, count


def perplexity(total: float, count: int) -> float:
    """Return exp(total / count); infinity where it is too large for a number.

    Raises: ZeroDivisionError without any token.
    """
    try:
        return math.exp(total / count)
    except OverflowError:
        return math.inf
