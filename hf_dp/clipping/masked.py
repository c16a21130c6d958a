"""Clipping where only some entries of each parameter train (PVAL, PARAM: DP-FROST, section 5).

A mask is the same for all examples, so the sum of the masked gradients is the masked sum of the
gradients; only the norms differ. Masked norms have no Gram form (the mask stands between the
factors), so each example's gradient is formed once, in blocks that stay in the processor's cache,
squared and dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from hf_dp._validate import invalid
from hf_dp.clipping.clipped_sum import ClippedSum
from hf_dp.clipping.engine import ClippingEngine
from hf_dp.clipping.gradients import Lookups, PerExampleGradient
from hf_dp.clipping.norms import ExampleNorms
from hf_dp.clipping.rounding import Norms, full_precision, squared_norms

# How many numbers of gradients are held at once: one MiB, which stays in a core's cache, or enough
# to keep a GPU busy.
_BLOCK = {"cpu": 2**18, "cuda": 2**26}


class MaskedEngine(ClippingEngine):
    """A :class:`ClippingEngine` for the entries that a mask keeps.

    Norms are taken over those entries alone, and sums are zero elsewhere. As there, an example is
    removed if its gradient is not finite, even in an entry that does not train.

    Args:
        masks: by parameter name, of the parameter's shape, True where an entry trains; all entries
            of a parameter without a mask train.

    Raises:
        InvalidArgumentError: a mask belongs to no trainable parameter or has another shape, or
            clipping is neither ``"flat"`` nor ``"automatic"``.
    """

    clippings = ("flat", "automatic")

    def __init__(
        self,
        model: nn.Module,
        masks: Mapping[str, Tensor],
        clipping_norm: float,
        clipping: str = "flat",
    ):
        super().__init__(model, clipping_norm, clipping)
        self.masks = dict(masks)

    def _begin(self) -> None:
        for name, mask in self.masks.items():
            parameter = self._parameters.get(name)
            if parameter is None or parameter.shape != mask.shape:
                raise invalid("masks", name, "to name a trainable parameter and to have its shape")
        self._masked = {self._parameters[name]: mask for name, mask in self.masks.items()}

    def collect(self) -> dict[str, Tensor]:
        sums = super().collect()
        for name, mask in self.masks.items():
            # Not by a product: where nothing is clipped, a sum may be infinite.
            sums[name].masked_fill_(~mask, 0)
        return sums

    def _take(self, clipped: ClippedSum, losses: Tensor) -> Tensor:
        uses = clipped.capture(losses)
        table = ExampleNorms(clipped.groups, clipped.units(losses))
        for parameter, mask in self._masked.items():
            if parameter in uses:
                table.put(parameter, masked_norms(uses[parameter], mask))
        whole = {parameter: of for parameter, of in uses.items() if parameter not in self._masked}
        table.add(whole)
        decision = clipped.decide(table, whole)
        del whole
        clipped.add(uses, decision)
        return decision.norms


@torch.no_grad()
@full_precision()
def masked_norms(uses: Sequence[PerExampleGradient], mask: Tensor) -> Norms:
    """Return norms of the entries of one parameter's gradient that ``mask``, of its shape, keeps.

    They are computed explicitly, so nothing cancels and the error is that of the last rounding. The
    slack is that of the whole sum, of which the masked sum is a part.
    """
    slack = torch.stack([use.slack() for use in uses]).sum(0)
    squared = torch.zeros(len(slack), dtype=torch.float64, device=slack.device)
    for examples, masked in _parts(
        uses, mask.reshape(mask.shape[:1].numel(), mask.shape[1:].numel()), slack
    ):
        squared.index_add_(0, examples, squared_norms(masked.flatten(1)).double())
    squared = squared.to(slack.dtype)
    return Norms(squared, 4 * torch.finfo(slack.dtype).eps * squared, slack)


def _parts(
    uses: Sequence[PerExampleGradient], mask: Tensor, of_examples: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield examples (k,) and a part of their masked gradients (k, ...), all nonzero parts once.

    The mask (m, n) is applied by a product; a `where` takes several times as long. Infinity times
    zero is NaN, which removes the example. The parts are of the kind of ``of_examples``, (b,).
    """
    dtype, device, b = of_examples.dtype, of_examples.device, len(of_examples)
    first, *others = uses
    if isinstance(first, Lookups) and not others:
        examples, rows_found, values = first.rows(dtype)
        yield examples, values.mul_(mask[rows_found])
        return
    height, width = mask.shape
    numbers = _BLOCK.get(device.type, _BLOCK["cpu"])
    rows = max(1, min(height, numbers // width))
    together = max(1, numbers // (rows * width))
    for top in range(0, height, rows):
        part = slice(top, min(top + rows, height))
        kept = mask[part].to(dtype)
        for start in range(0, b, together):
            examples = torch.arange(start, min(start + together, b), device=device)
            here = slice(start, start + len(examples))
            gradients = first.block(here, part, dtype)
            for use in others:
                gradients = gradients + use.block(here, part, dtype)
            yield examples, gradients * kept
