"""Compute how perplexed a decoder is by each suffix after a prefix."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hf_dp.errors import UnsupportedModelError
from hf_dp.losses import base_model

_LOGITS = 2**25  # numbers in the logits of a batch, 128 MiB of float32


def log_perplexities(
    model: Any, prefix: Sequence[int], suffixes: torch.Tensor, *, progress: bool = True
) -> NDArray[np.float64]:
    """Return -log2 p(suffix | prefix) of each suffix, (n,), in bits.

    The prefix is computed once, and suffixes that differ in their last token alone share a forward,
    so all of V^l cost V^(l - 1).

    Args:
        model: a causal language model, or an adapter on one; it is left as it was.
        prefix: token ids, at least one.
        suffixes: (n, l) token ids, l at least 2.
        progress: show a bar.

    Raises: UnsupportedModelError for a model without a cache of keys and values.
    """
    from tqdm.auto import tqdm

    device, training = next(model.parameters()).device, model.training
    length = suffixes.shape[1]
    # `groups[i]` is the place of the beginning of suffix i among all different beginnings.
    beginnings, groups = suffixes[:, :-1].unique(dim=0, return_inverse=True)
    order = groups.argsort()
    sorted_groups = groups[order]
    found = torch.empty(len(suffixes), dtype=torch.float64)
    base: Any = base_model(model)  # goes on after the prefix, and after virtual tokens before it
    size = _batch_size(base, length)
    try:
        model.eval()
        with torch.no_grad():
            begin = torch.tensor([list(prefix)], device=device)
            after = model(input_ids=begin, attention_mask=torch.ones_like(begin), use_cache=True)
            kept: Any = getattr(after, "past_key_values", None)
            if not hasattr(kept, "batch_repeat_interleave"):
                raise UnsupportedModelError(
                    f"{type(base).__name__} keeps no cache of the tokens before, after which "
                    "suffixes could be scored. Audit a decoder with attention, such as GPT-2."
                )
            starts = range(0, len(beginnings), size)
            for at in tqdm(starts, desc="Scoring suffixes", disable=not progress):
                rows = beginnings[at : at + size].to(device)
                cache = copy.deepcopy(kept)
                cache.batch_repeat_interleave(len(rows))
                later = base(input_ids=rows, past_key_values=cache).logits
                logits = torch.cat([after.logits[:, -1:].expand(len(rows), -1, -1), later], 1)
                log_p = logits.float().log_softmax(-1)
                first, last = torch.searchsorted(sorted_groups, torch.tensor([at, at + len(rows)]))
                own = order[first:last]
                each = log_p[(groups[own] - at)[:, None], torch.arange(length), suffixes[own]]
                found[own] = each.double().sum(1).cpu()
    finally:
        model.train(training)
    return -found.numpy() / np.log(2)


def _batch_size(base: Any, length: int) -> int:
    """Return a number of sequences whose logits fit."""
    return max(1, min(1024, _LOGITS // (length * base.get_input_embeddings().num_embeddings)))
