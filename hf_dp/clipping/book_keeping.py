"""Book-keeping (Bu et al. 2023, after the ghost norm of Li et al., section 4): one backward pass
records what each trainable parameter met; norms follow from the records, then each weight gradient
is formed once, as a weighted matrix product."""

from __future__ import annotations

from torch import Tensor, nn

from hf_dp.clipping.bundles import bundled
from hf_dp.clipping.clipped_sum import ClippedSum
from hf_dp.clipping.gradients import PerExampleGradient
from hf_dp.clipping.norms import ExampleNorms


def book_keeping(step: ClippedSum, losses: Tensor) -> Tensor:
    """Adds the clipped gradients to the step's sums; returns the examples' norms (b,). Holds all
    records at once."""
    return clip_and_add(step, step.capture(losses), len(losses))


def clip_and_add(
    step: ClippedSum, uses: dict[nn.Parameter, list[PerExampleGradient]], examples: int
) -> Tensor:
    """Norms from the records of a batch, weights from the norms, weighted sums from records and
    weights; the norms (b,)."""
    bundles = bundled(uses, step.groups)
    table = ExampleNorms(step.groups, examples)
    for bundle in bundles:  # one row for all: nothing in it can be in doubt
        table.add({bundle.parameters[0]: [bundle.use]})
    table.add(uses)
    table.settle(uses)
    decision = step.decide(table)
    step.add(uses, decision)
    for bundle in bundles:
        step.add_bundle(bundle, decision)
    return decision.norms
