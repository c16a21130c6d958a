"""DP-SGD: noise on the clipped sum, in ``p.grad``; any optimizer then makes it DP-Adam and so on (Li et al., algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from hf_dp.accounting import TRAINING
from hf_dp.noise import SecretRandomness
from hf_dp.plan import PrivacyPlan
from hf_dp.trainer.run_ledger import RunLedger


@torch.no_grad()
def release_gradient(
    parameters: Mapping[str, nn.Parameter],
    sums: dict[str, Tensor],
    plan: PrivacyPlan,
    randomness: SecretRandomness,
    run: RunLedger,
    finish: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
) -> None:
    """``p.grad = (clipped sum + N(0, (noise_multiplier C)^2)) / expected_batch_size`` for every trainable parameter.

    The noise is drawn once per logical batch and the divisor is a public constant, also for an empty draw. The step is in
    the durable ledger before any ``p.grad`` is set: whatever is killed afterwards, nothing unrecorded was visible.
    """
    for total in sums.values():
        total.add_(randomness.gaussian_like(total, plan.noise_std)).div_(plan.expected_batch_size)
    run.append(plan.event(steps=1), TRAINING)
    if finish is not None:  # a function of what is noised: free
        sums = finish(sums)
    for name, parameter in parameters.items():
        parameter.grad = sums.pop(name).to(parameter.dtype)
