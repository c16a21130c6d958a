"""Book-keeping (Bu et al. 2023, after the ghost norm of Li et al., section 4): one backward pass records what each trainable
parameter met; norms follow from the records, then each weight gradient is formed once, as a weighted matrix product."""

from __future__ import annotations

from torch import Tensor

from hf_dp.clipping.bundles import bundled
from hf_dp.clipping.norms import ExampleNorms
from hf_dp.clipping.step import ClippedStep


def book_keeping(step: ClippedStep, losses: Tensor) -> Tensor:
    """Adds the clipped gradients to the step's sums; returns the examples' norms (b,). Holds all records at once."""
    uses = step.records(losses)
    bundles = bundled(uses, step.groups)
    table = ExampleNorms(step.groups, len(losses))
    for bundle in bundles:  # one row for all: nothing in it can be in doubt
        table.add(bundle.parameters[0], [bundle.use])
    for parameter, of_parameter in uses.items():
        table.add(parameter, of_parameter)
    table.settle(uses)
    decision = step.decide(table)
    for parameter in list(uses):
        for use in uses.pop(parameter):  # records are freed as they are used
            step.add(parameter, use, decision)
    for bundle in bundles:
        step.add_bundle(bundle, decision)
    return decision.norms
