"""Book-keeping: one backward pass (Bu et al. 2023, after the ghost norm of Li et al., section 4).

The pass captures what each trainable parameter met. The norms follow from that, and then each
weight gradient is formed once, as a weighted matrix product.
"""

from __future__ import annotations

from torch import Tensor, nn

from hf_dp.clipping.bundles import bundled
from hf_dp.clipping.clipped_sum import ClippedSum
from hf_dp.clipping.forms import form_name, held_bytes, make_explicit
from hf_dp.clipping.gradients import PerExampleGradient
from hf_dp.clipping.norms import ExampleNorms


def book_keeping(clipped: ClippedSum, losses: Tensor) -> Tensor:
    """Add the clipped gradients to the sums; return the examples' norms (b,).

    Holds everything that the backward pass captured at once.
    """
    uses = clipped.capture(losses)
    make_explicit(uses, clipped.spare(held_bytes(uses)))
    clipped.forms = {parameter: form_name(of_one) for parameter, of_one in uses.items()}
    return clip_and_add(clipped, uses, clipped.units(losses))


def clip_and_add(
    clipped: ClippedSum, uses: dict[nn.Parameter, list[PerExampleGradient]], examples: int
) -> Tensor:
    """Take norms, turn them into weights and add the weighted sums; return the norms (b,).

    Consumes ``uses``.
    """
    bundles = bundled(uses, clipped.groups, clipped.shards)
    table = ExampleNorms(clipped.groups, examples)
    for bundle in bundles:  # under one name for all its parameters: a dense norm needs no settling
        table.add({bundle.parameters[0]: [bundle.gradient]})
    table.add(uses)
    decision = clipped.decide(table, uses)
    clipped.add(uses, decision)
    for bundle in bundles:
        clipped.add_bundle(bundle, decision)
    return decision.norms
