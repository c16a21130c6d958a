"""Book-keeping (Bu et al. 2023, after the ghost norm of Li et al., section 4): one backward pass records what each trainable
parameter met; norms follow from the records, then each weight gradient is formed once, as a weighted matrix product."""

from __future__ import annotations

from torch import Tensor, nn

from hf_dp.clipping.bundles import bundled
from hf_dp.clipping.norms import ExampleNorms, gathered
from hf_dp.clipping.step import ClippedStep
from hf_dp.clipping.uses import OuterProducts, Use


def book_keeping(step: ClippedStep, losses: Tensor) -> Tensor:
    """Adds the clipped gradients to the step's sums; returns the examples' norms (b,). Holds all records at once."""
    uses: dict[nn.Parameter, list[Use]] = {}
    table = ExampleNorms(step.groups, len(losses))
    expected = step.forward_uses()
    versions: dict[nn.Parameter, tuple[int, int]] = {}

    def keep(parameter: nn.Parameter, use: Use) -> None:
        known = uses.get(parameter, [])
        uses[parameter] = gathered([*known, use], parameter.shape)
        if not known and isinstance(use, OuterProducts) and expected[parameter] == 1:
            table.add(parameter, [use])  # while the record is in the processor's cache
            versions[parameter] = _versions(use)
        else:
            table.forget(parameter)  # used again: all its uses are measured together

    step.backward(losses, keep)
    bundles = bundled(uses, step.groups)
    for bundle in bundles:  # one row for all: nothing in it can be in doubt
        table.add(bundle.parameters[0], [bundle.use])
    for parameter, of_parameter in uses.items():
        # What is added must be what was measured: a gradient hook may since have changed a record in place.
        if parameter not in table or versions[parameter] != _versions(of_parameter[0]):
            table.add(parameter, of_parameter)
    table.settle(uses)
    decision = step.decide(table)
    for parameter in list(uses):
        for use in uses.pop(parameter):  # records are freed as they are used
            step.add(parameter, use, decision)
    for bundle in bundles:
        step.add_bundle(bundle, decision)
    return decision.norms


def _versions(use: Use) -> tuple[int, int]:
    """How often the tensors of a record were changed in place."""
    assert isinstance(use, OuterProducts)
    return use.left._version, use.right._version
