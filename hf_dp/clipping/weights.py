"""From per-example gradient norms to clipping weights.

Adding or removing one example moves a weighted sum by at most C. Each clipping function gives one
weight to each *group* of parameters of each example. With n_k the norm of group k and w_k its
weight, the example's contribution is the concatenation of the ``w_k G_k``, of norm
``sqrt(sum_k (w_k n_k)^2)``:

* ``flat``, one group: ``w = min(1, C / n)``, so ``w n <= C`` (Abadi et al. 2016; Li et al.,
  algorithm 1).
* ``automatic``, one group: ``w = C / (n + gamma)``, so ``w n = C n / (n + gamma) < C`` (AUTO-S, Bu
  et al. 2023, section 4). Every example is scaled, small gradients up: the learning rate is not
  interchangeable with flat clipping's.
* ``per_layer``, K groups: ``w_k = min(1, (C / sqrt(K)) / n_k)``, so the norm is at most
  ``sqrt(K (C / sqrt(K))^2) = C`` (McMahan et al. 2018, section 2.3, all layers alike).

A second norm may bound the weights further: the example's ``w_k`` is as if its norm were at least
that one. :func:`hf_dp.plans.rounding.slack_cap` says why.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# AUTO-S's stability constant; its authors' default (Bu et al. 2023, section 4.2).
AUTOMATIC_GAMMA = 0.01


def clipping_weights(
    clipping: str, norms: Tensor, clipping_norm: float, at_least: Tensor | None = None
) -> Tensor:
    """Return the weight of each group of each example, (K, b) as ``norms``.

    Guarantee: for finite norms, ``sqrt(sum_k (weights[k] norms[k])^2) <= clipping_norm``, up to
    one rounding; and the same of ``at_least``.

    | norm (flat) | weight |
    |-------------|--------|
    | 0           | 1      |
    | <= C        | 1      |
    | > C         | C/norm |
    | inf or NaN  | 0 in all groups (the caller also zeroes its gradients: 0 * NaN is NaN) |

    Args:
        clipping: one of :data:`hf_dp.plans.dp_sgd.CLIPPINGS`.
        norms: (K, b), float.
        clipping_norm: C > 0, in the units of the norms.
        at_least: norms below which none counts, (K, b); None for 0.
    """
    if at_least is not None:
        norms = torch.maximum(norms, at_least)
    if clipping == "automatic":
        weights = clipping_norm / (norms + AUTOMATIC_GAMMA)
    else:
        bound = clipping_norm / math.sqrt(len(norms))  # one group: C itself
        weights = bound / norms.clamp_min(bound)
    return torch.where(torch.isfinite(norms).all(0), weights, torch.zeros_like(weights))
