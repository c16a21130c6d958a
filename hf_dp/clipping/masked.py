"""Clipping where only some entries of each parameter train (PVAL, PARAM: DP-FROST, section 5).

A mask is the same for all examples, so the sum of the masked gradients is the masked sum of the
gradients: only the norms are others. Those have no Gram form (the mask stands between the factors),
so each example's gradient is formed once, in blocks that stay in the processor's cache, squared and
dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from hf_dp._validate import invalid, one_of
from hf_dp.clipping.clipped_sum import ClippedSum
from hf_dp.clipping.engine import ClippingEngine
from hf_dp.clipping.gradients import (
    Lookups,
    Norms,
    PerExampleGradient,
    full_precision,
    squared_norms,
)
from hf_dp.clipping.norms import ExampleNorms

CLIPPINGS = ("flat", "automatic")

# Numbers of gradients that are held at once: one MiB, so that they stay in a core's cache, or what
# fills a GPU.
_BLOCK = {"cpu": 2**18, "cuda": 2**26}


class MaskedEngine(ClippingEngine):
    """As :class:`ClippingEngine` for the entries that a mask keeps: norms over those alone, sums
    zero elsewhere.

    An example is removed, as there, when its gradient is not finite, entries that do not train
    included.

    Args:
        masks: by parameter name, True where an entry trains, of the parameter's shape; a parameter
            without one trains whole.

    Raises: InvalidArgumentError for a mask of no trainable parameter or of another shape, or
        clipping other than ``"flat"`` and ``"automatic"``.
    """

    def __init__(
        self,
        model: nn.Module,
        masks: Mapping[str, Tensor],
        clipping_norm: float,
        clipping: str = "flat",
    ):
        super().__init__(model, clipping_norm, one_of("clipping", clipping, CLIPPINGS))
        self.masks = dict(masks)

    def __enter__(self) -> MaskedEngine:
        super().__enter__()
        for name, mask in self.masks.items():
            parameter = self._parameters.get(name)
            if parameter is None or parameter.shape != mask.shape:
                self.__exit__()
                raise invalid("masks", name, "to be of a trainable parameter, and of its shape")
        self._masked = {self._parameters[name]: mask for name, mask in self.masks.items()}
        return self

    def collect(self) -> dict[str, Tensor]:
        sums = super().collect()
        for name, mask in self.masks.items():
            sums[name].masked_fill_(
                ~mask, 0
            )  # not a product: where nothing is clipped a sum may be infinite
        return sums

    def _take(self, step: ClippedSum, losses: Tensor) -> Tensor:
        uses = step.capture(losses)
        table = ExampleNorms(step.groups, len(losses))
        for parameter, mask in self._masked.items():
            if parameter in uses:
                table.put(parameter, masked_norms(uses[parameter], mask))
        whole = {parameter: of for parameter, of in uses.items() if parameter not in self._masked}
        table.add(whole)
        table.settle(whole)
        del whole
        decision = step.decide(table)
        step.add(uses, decision)
        return decision.norms


@torch.no_grad()
@full_precision()
def masked_norms(uses: Sequence[PerExampleGradient], mask: Tensor) -> Norms:
    """Norms of the entries of one parameter's gradient that ``mask``, of its shape, keeps.

    Explicit, so that nothing cancels: the error is that of the last rounding. The slack is that of
    the whole sum, of which the masked one is a part.
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
    """Which examples (k,), and a part of their masked gradients (k, ...); together all that is not
    zero.

    Masked by a product, which a `where` would take several times as long as: infinite times zero is
    NaN, and removes the example.

    Args: mask: (m, n). of_examples: (b,), whose dtype and device the parts take.
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
