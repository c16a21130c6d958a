"""Two passes over one graph (the ghost clipping of Li et al., section 4): the first gives norms and
drops each record as soon as its norm is known, the second meets the same records again and adds
them, weighted, to the sums.

The weights multiply the records and not the losses, as published: both backwards then do the same
arithmetic, so what is added is what was measured, also in bfloat16 and where an example's gradient
is not finite. Random numbers drawn in backward (by checkpoints) are the same in both, and every
record is compared with the first by its norm. Uses of one parameter are joined in both alike: added
one by one, uses that cancel would leave in the sum the rounding of each (56 C was measured).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_dp.clipping.clipped_sum import ClippedSum
from hf_dp.clipping.dropout_masks import random_state, set_random_state
from hf_dp.clipping.gradients import PerExampleGradient
from hf_dp.clipping.norms import ExampleNorms, gathered
from hf_dp.errors import UnsupportedModelError

# Largest relative difference between two runs of the same kernels (atomic additions on a GPU).
_REPEATABLE = 1e-4


def two_pass(step: ClippedSum, losses: Tensor) -> Tensor:
    """Adds the clipped gradients to the step's sums; returns the examples' norms (b,).

    Only parameters that the forward used more than once (tied, reused) are held until all their
    uses are known.
    """
    table = ExampleNorms(step.groups, len(losses))
    expected = step.forward_uses()
    waiting: dict[nn.Parameter, list[PerExampleGradient]] = {}
    counts: dict[nn.Parameter, int] = {}
    fingerprints: dict[nn.Parameter, list[Tensor]] = {}

    def finish(parameter: nn.Parameter) -> None:
        uses = waiting.pop(parameter)
        table.add({parameter: uses})
        table.settle({parameter: uses})

    def measure(parameter: nn.Parameter, use: PerExampleGradient) -> None:
        if parameter in table:
            raise UnsupportedModelError(
                f"A parameter of shape {tuple(parameter.shape)} met more gradients in backward "
                "than uses in the forward, so its norm is not known when it is needed. Use "
                "clipping_strategy='book_keeping'."
            )
        fingerprints.setdefault(parameter, []).append(use.fingerprint())
        waiting[parameter] = gathered([*waiting.get(parameter, ()), use], parameter.shape)
        counts[parameter] = counts.get(parameter, 0) + 1
        if counts[parameter] == expected[parameter]:
            finish(parameter)

    def add(parameter: nn.Parameter, use: PerExampleGradient) -> None:
        # What is added must be what was measured, or its norm is not known to be within the
        # clipping norm.
        seen = fingerprints.get(parameter)
        if not seen or not _same(seen.pop(0), use.fingerprint()):
            raise UnsupportedModelError(
                "The second backward pass met other values at a parameter of shape "
                f"{tuple(parameter.shape)} than the first: a checkpointed forward draws random "
                "numbers that are not restored, or keeps state. Use "
                "clipping_strategy='book_keeping', and preserve_rng_state=True for checkpoints."
            )
        waiting[parameter] = gathered([*waiting.get(parameter, ()), use], parameter.shape)
        if not seen:
            step.add({parameter: waiting.pop(parameter)}, decision)

    device = losses.device
    before = random_state(device)
    step.backward(losses, measure, retain_graph=True)
    for parameter in list(waiting):
        finish(parameter)
    decision = step.decide(table)
    after = random_state(device)
    set_random_state(device, before)  # a checkpointed forward that does not restore it runs again
    try:
        step.backward(losses, add)
    finally:
        set_random_state(device, after)
    if any(fingerprints.values()):
        raise UnsupportedModelError(
            "The second backward pass met fewer gradients than the first, so parts of examples "
            "would be missing from the sum. Use clipping_strategy='book_keeping'."
        )
    return decision.norms


def _same(first: Tensor, second: Tensor) -> bool:
    finite = torch.isfinite(first)  # other examples are not used
    return bool(((first - second).abs() <= _REPEATABLE * first.abs())[finite].all())
