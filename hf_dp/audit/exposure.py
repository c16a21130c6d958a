"""Exposure of a canary: how many bits of a search for it a model saves (Carlini et al., 2019).

A canary's suffix was drawn at random from a space R. Ordered by the model's log-perplexity, the
true suffix has a rank; its exposure is log2 |R| - log2 rank. A model that knows nothing of it gives
an average of 1 / ln 2 = 1.44 bits, one that has it by heart log2 |R|.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from hf_dp._validate import integer, non_negative, positive
from hf_dp.errors import DataError, UnsupportedModelError
from hf_dp.losses import base_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOGITS = 2**25  # numbers in the logits of a batch, 128 MiB of float32
AT_RANDOM = 1 / math.log(2)  # the mean of -log2 U, U uniform on (0, 1): a model that knows nothing


@dataclass(frozen=True)
class Ranked:
    """The exact exposure. A tie counts against the canary: whatever is as little perplexing stands
    before it, so exposure is never overstated."""

    exposure: float  # in bits
    rank: int  # 1 for the least perplexing of all
    tied: int  # how many others are exactly as perplexing
    size: int  # |R|


def exact(canary: float, others: ArrayLike) -> Ranked:
    """Return the exposure by the rank among all of R.

    Args:
        canary: its log-perplexity.
        others: those of all other members of R, in the same unit.

    Raises: DataError for a number that is not finite.
    """
    values = _finite(canary, others)
    rank, tied = 1 + int((values <= canary).sum()), int((values == canary).sum())
    size = len(values) + 1
    return Ranked(math.log2(size) - math.log2(rank), rank, tied, size)


@dataclass(frozen=True)
class Approximated:
    """Exposure by a distribution model: -log2 P(perplexity <= the canary's)."""

    exposure: float  # in bits; it can exceed log2 |R|, since a skew-normal has no end
    # More than log2(sample + 1), all that a sample of this size can tell by itself: what is beyond
    # rests on the shape of the skew-normal.
    extrapolated: bool
    sample: int  # the number of candidates that it was fitted to
    shape: float
    location: float
    scale: float
    distance: float  # between the fitted distribution and the sample, 0 to 1
    # Of the test of Kolmogorov and Smirnov. The fit has seen the sample, so it is larger than it
    # should be: a small one refutes the fit, a large one says little.
    p_value: float


def approximate(canary: float, sample: ArrayLike) -> Approximated:
    """Return the exposure by a skew-normal that is fitted to the candidates' log-perplexities.

    Args:
        canary: its log-perplexity.
        sample: those of candidates drawn at random from R, the canary not among them; at least 100.

    Raises: DataError for a number that is not finite, too few of them, or all the same.
    """
    from scipy.stats import kstest, skewnorm

    values = _finite(canary, sample)
    if len(values) < 100 or np.ptp(values) == 0:
        raise DataError(
            "Expected at least 100 candidates of different perplexity to fit a skew-normal to, "
            f"got {len(values)} from {values.min():g} to {values.max():g}. Raise `candidates`; if "
            "the model finds all of them alike, there is nothing to measure."
        )
    shape, location, scale = (float(each) for each in skewnorm.fit(values))
    test = kstest(values, skewnorm(shape, location, scale).cdf)
    exposure = -log_cdf((canary - location) / scale, shape) / math.log(2)
    return Approximated(
        exposure=exposure,
        extrapolated=exposure > math.log2(len(values) + 1),
        sample=len(values),
        shape=shape,
        location=location,
        scale=scale,
        distance=float(test.statistic),
        p_value=float(test.pvalue),
    )


def log_cdf(z: float, shape: float) -> float:
    """Return ln P(Z <= z) of a standard skew-normal, also where P is too small for a number. The
    density is 2 phi(z) Phi(shape z)."""
    from scipy.integrate import quad
    from scipy.special import log_ndtr
    from scipy.stats import skewnorm

    z = float(z)
    direct = float(skewnorm.cdf(z, shape))
    if direct > 1e-4:  # below, it is a difference of nearly equal numbers
        return math.log(direct)

    def log_phi(t: float) -> float:
        return -t * t / 2 - math.log(2 * math.pi) / 2

    def log_density(t: float) -> float:
        return math.log(2) + log_phi(t) + float(log_ndtr(shape * t))

    # The density is log-concave, so left of here it falls at least as fast as here.
    there = log_density(z)
    slope = -z + shape * math.exp(log_phi(shape * z) - float(log_ndtr(shape * z)))
    area, _ = quad(lambda s: math.exp(log_density(z - s / slope) - there), 0, math.inf)
    return there - math.log(slope) + math.log(area)


def most_exposed(epsilon: float, delta: float, repetitions: int, size: int) -> float:
    """Return a bound on the mean exposure of a canary, in bits, for a private model.

    A canary is drawn uniformly from R and stands in ``repetitions`` rows. Without them the model
    knows nothing of it: P(rank <= k) <= k / |R|. With them, by the privacy of a group of rows,
    P(rank <= k) <= e^(r epsilon) k / |R| + delta (e^(r epsilon) - 1) / (e^epsilon - 1). It bounds
    the exact exposure; that of a fitted distribution is not bounded by anything.

    Args:
        epsilon, delta: of one row, taken out or not.
        repetitions: r.
        size: |R|.

    Raises: InvalidArgumentError.
    """
    positive("epsilon", epsilon)
    non_negative("delta", delta)
    bits = math.log2(integer("size", size, 2))
    group = integer("repetitions", repetitions, 1) * epsilon
    if group / math.log(2) >= bits:
        return bits
    # The integral of P(exposure >= x) from 0 to bits, with P at most 1.
    slack = delta * math.expm1(group) / math.expm1(epsilon)
    tail = (1 - math.exp(group) / size) / math.log(2)
    return min(bits, group / math.log(2) + tail + slack * bits)


def _finite(canary: float, others: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(others, dtype=np.float64)
    if not math.isfinite(canary) or not np.isfinite(values).all():
        raise DataError(
            "The model's log-perplexities are not all finite, so there is no rank. Its training "
            "has probably diverged: lower the learning rate."
        )
    return values


def log_perplexities(
    model: PreTrainedModel, prefix: Sequence[int], suffixes: torch.Tensor, *, progress: bool = True
) -> NDArray[np.float64]:
    """Return -log2 p(suffix | prefix), in bits, (n,), of suffixes of l >= 2 token ids, (n, l).

    The prefix is computed once, and suffixes that differ in their last token alone share a forward,
    so all of V^l cost V^(l - 1). The model, or an adapter on one, is left as it was.
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
    numbers = length * base.get_input_embeddings().num_embeddings
    size = max(1, min(1024, _LOGITS // numbers))
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
