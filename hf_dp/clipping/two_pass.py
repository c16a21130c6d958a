"""Two passes over one graph (the ghost clipping of Li et al., section 4): the first gives norms and drops each record as soon
as its norm is known, the second meets the same records again and adds them, weighted, to the sums.

The weights multiply the records and not the losses, as published: both backwards then do the same arithmetic, so what is
added is what was measured, to the last bit, also in bfloat16 and where an example's gradient is not finite.
"""

from __future__ import annotations

from torch import Tensor, nn

from hf_dp.clipping.norms import ExampleNorms, gathered
from hf_dp.clipping.step import ClippedStep
from hf_dp.clipping.uses import Use
from hf_dp.errors import UnsupportedModelError


def two_pass(step: ClippedStep, losses: Tensor) -> Tensor:
    """Adds the clipped gradients to the step's sums; returns the examples' norms (b,).

    Only parameters that the forward used more than once (tied, reused) are held until all their uses are known.
    """
    table = ExampleNorms(step.groups, len(losses))
    expected = step.forward_uses()
    waiting: dict[nn.Parameter, list[Use]] = {}
    counts: dict[nn.Parameter, int] = {}

    def finish(parameter: nn.Parameter) -> None:
        uses = waiting.pop(parameter)
        table.add(parameter, uses)
        table.settle({parameter: uses})

    def measure(parameter: nn.Parameter, use: Use) -> None:
        if parameter in table:
            raise UnsupportedModelError(
                f"A parameter of shape {tuple(parameter.shape)} met more gradients in backward than uses in the forward, so "
                "its norm is not known when it is needed. Use clipping_strategy='book_keeping'."
            )
        waiting[parameter] = gathered([*waiting.get(parameter, ()), use])
        counts[parameter] = counts.get(parameter, 0) + 1
        if counts[parameter] == expected[parameter]:
            finish(parameter)

    step.backward(losses, measure, retain_graph=True)
    for parameter in list(waiting):
        finish(parameter)
    decision = step.decide(table)
    step.backward(losses, lambda parameter, use: step.add(parameter, use, decision))
    return decision.norms
