"""How perplexed a decoder is by each suffix after a prefix."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hf_dp.losses import base_model

_LOGITS = 2**25  # numbers in the logits of a batch, 128 MiB of float32


def log_perplexities(
    model: Any, prefix: Sequence[int], suffixes: torch.Tensor, *, progress: bool = True
) -> NDArray[np.float64]:
    """Return -log2 p(suffix | prefix) of each suffix, (n,), in bits.

    Suffixes that differ in their last token alone share a forward, so all of V^l cost V^(l - 1).

    Args:
        model: a causal language model, or an adapter on one; it is left as it was.
        prefix: token ids, at least one.
        suffixes: (n, l) token ids.
        progress: show a bar.
    """
    from tqdm.auto import tqdm

    device, training = next(model.parameters()).device, model.training
    begin = torch.tensor(list(prefix), device=device)
    length = suffixes.shape[1]
    # `groups[i]` is the place of the beginning of suffix i among all different beginnings.
    beginnings, groups = suffixes[:, :-1].unique(dim=0, return_inverse=True)
    order = groups.argsort()
    sorted_groups = groups[order]
    found = torch.empty(len(suffixes), dtype=torch.float64)
    size = _batch_size(model, length, len(begin))
    starts = range(0, len(beginnings), size)
    try:
        model.eval()
        with torch.no_grad():
            for at in tqdm(starts, desc="Scoring suffixes", disable=not progress):
                rows = beginnings[at : at + size].to(device)
                ids = torch.cat([begin.expand(len(rows), -1), rows], 1)
                inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
                logits = model(**inputs, **_keep(model, length)).logits[:, -length:]
                log_p = logits.float().log_softmax(-1)
                first, last = torch.searchsorted(sorted_groups, torch.tensor([at, at + len(rows)]))
                own = order[first:last]
                each = log_p[(groups[own] - at)[:, None], torch.arange(length), suffixes[own]]
                found[own] = each.double().sum(1).cpu()
    finally:
        model.train(training)
    return -found.numpy() / np.log(2)


def _keep(model: Any, length: int) -> dict[str, int]:
    """Return what makes the model compute the last logits only, where it can."""
    takes = "logits_to_keep" in inspect.signature(type(base_model(model)).forward).parameters
    return {"logits_to_keep": length} if takes else {}


def _batch_size(model: Any, length: int, prefix: int) -> int:
    """Return a number of sequences whose logits fit."""
    positions = length if _keep(model, length) else prefix + length
    base: Any = base_model(model)
    vocabulary = base.get_input_embeddings().num_embeddings
    return max(1, min(1024, _LOGITS // (positions * vocabulary)))
