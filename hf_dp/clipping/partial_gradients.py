"""Engines that clip a part of each gradient: some entries, or a projection onto low-rank carriers.

**Masks** (PVAL, PARAM: DP-FROST, section 5). A mask is the same for all examples, so the sum of the
masked gradients is the masked sum of the gradients; only the norms differ. Masked norms have no
Gram form (the mask stands between the factors), so each example's gradient is formed once, in
blocks that stay in the processor's cache, squared and dropped.

**Carriers** (RGP, Yu et al. 2021, algorithm 1). The paper is arXiv 2106.09352. A weight W (m, n) is
written as ``L R + (W - L R)``, with the second part constant, L (m, r) with orthonormal columns and
R (r, n) with orthonormal rows. The gradients of L and R, ``G R^T`` and ``L^T G`` for the gradient G
of W, are clipped and noised instead of G: r (m + n) numbers where G has m n. The model's value and
derivative are those of W, so nothing in the model changes: the gradients of W's uses are projected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from hf_dp._validate import invalid
from hf_dp.clipping.clipped_sum import ClippedSum, clip_and_add
from hf_dp.clipping.engine import ClippingEngine
from hf_dp.clipping.gradients import Dense, Lookups, OuterProducts, PerExampleGradient
from hf_dp.clipping.norms import ExampleNorms
from hf_dp.clipping.rounding import (
    Norms,
    accumulation_dtype,
    full_precision,
    squared_norms,
    zero_sum,
)

# How many numbers of gradients are held at once: one MiB, which stays in a core's cache, or enough
# to keep a GPU busy.
_BLOCK = {"cpu": 2**18, "cuda": 2**26}

Part = TypeVar("Part")


class _PartialEngine(ClippingEngine, Generic[Part]):
    """A :class:`ClippingEngine` that clips a part of some gradients, given by parameter name.

    Raises: InvalidArgumentError where clipping is neither ``"flat"`` nor ``"automatic"``.
    """

    clippings = ("flat", "automatic")

    def __init__(
        self,
        model: nn.Module,
        parts: Mapping[str, Part],
        clipping_norm: float,
        clipping: str = "flat",
    ):
        super().__init__(model, clipping_norm, clipping)
        self.parts = dict(parts)


class MaskedEngine(_PartialEngine[Tensor]):
    """A :class:`ClippingEngine` for the entries that a mask keeps.

    Norms are taken over those entries alone, and sums are zero elsewhere. As there, an example is
    removed if its gradient is not finite, even in an entry that does not train.

    Args:
        parts: masks of the parameters' shapes, True where an entry trains; all entries of a
            parameter without a mask train.

    Raises: InvalidArgumentError also for a mask of no trainable parameter or of another shape.
    """

    def _begin(self) -> None:
        for name, mask in self.parts.items():
            parameter = self._parameters.get(name)
            if parameter is None or parameter.shape != mask.shape:
                raise invalid("parts", name, "to name a trainable parameter and to have its shape")
        self._masked = {self._parameters[name]: mask for name, mask in self.parts.items()}

    def collect(self) -> dict[str, Tensor]:
        sums = super().collect()
        for name, mask in self.parts.items():
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
    slack is that of the whole sum, of which the masked sum is a part."""
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
    zero is NaN, which removes the example. The parts are of the kind of ``of_examples``, (b,)."""
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


LEFT, RIGHT = ".left_carrier", ".right_carrier"  # what follows a weight's name in the sums


@dataclass(frozen=True)
class Carriers:
    """``left`` (m, r) with orthonormal columns, ``right`` (r, n) with orthonormal rows."""

    left: Tensor
    right: Tensor

    def gradient(self, of_left: Tensor, of_right: Tensor) -> Tensor:
        """Return the weight's gradient, (m, n), from those of the carriers (section 3.2). It is
        ``dL R + L dR - L L^T dL R``. With the exact ``dL = G R^T`` and ``dR = L^T G`` it is the
        projection of G onto the span of L or of R."""
        return of_left @ self.right + self.left @ (of_right - self.left.mT @ of_left @ self.right)


class LowRankEngine(_PartialEngine[Carriers]):
    """A :class:`ClippingEngine` that clips and sums carriers' gradients in place of the weights'.

    ``collect()`` returns them as ``NAME.left_carrier`` (m, r) and ``NAME.right_carrier`` (r, n),
    and other parameters under their own names.

    Args:
        parts: carriers of parameters that are matrices.

    Raises: InvalidArgumentError also for carriers of something that is not a trainable matrix.
    """

    def _begin(self) -> None:
        self._pairs: dict[nn.Parameter, tuple[nn.Parameter, nn.Parameter]] = {}
        for name, each in self.parts.items():
            parameter = self._parameters.get(name)
            if parameter is None or parameter.shape != (len(each.left), each.right.shape[1]):
                raise invalid("parts", name, "to name a trainable matrix and to match its shape")
            # These parameters hold no values. They are the keys under which the engine keeps the
            # carriers' norms and sums.
            dtype = accumulation_dtype(parameter.dtype)
            each = self.parts[name] = Carriers(each.left.to(dtype), each.right.to(dtype))
            pair = tuple(nn.Parameter(torch.empty_like(part)) for part in (each.left, each.right))
            self._pairs[parameter] = pair  # type: ignore[assignment]
            self._groups |= dict.fromkeys(pair, 0)

    def _take(self, clipped: ClippedSum, losses: Tensor) -> Tensor:
        uses = clipped.capture(losses)
        names = {parameter: name for name, parameter in self._parameters.items()}
        with torch.no_grad(), full_precision():
            for parameter, pair in self._pairs.items():
                if parameter in uses:
                    projected = _project(
                        uses.pop(parameter), self.parts[names[parameter]], parameter.shape
                    )
                    uses |= {part: [use] for part, use in zip(pair, projected, strict=True)}
        return clip_and_add(clipped, uses, clipped.units(losses))

    def collect(self) -> dict[str, Tensor]:
        sums, found = self._sums, super().collect()
        for name in self.parts:
            del found[name]
            for ending, part in zip(
                (LEFT, RIGHT), self._pairs[self._parameters[name]], strict=True
            ):
                found[name + ending] = (
                    sums[part] if part in sums else zero_sum(part.shape, part.device)
                )
        return found


def _project(
    uses: Sequence[PerExampleGradient], carriers: Carriers, shape: torch.Size
) -> tuple[Dense, Dense]:
    """Return the per-example gradients of both carriers."""
    lefts, rights = [], []
    for use in uses:
        if isinstance(use, OuterProducts):
            dtype = accumulation_dtype(use.left.dtype)
            left, right = use.left.to(dtype), use.right.to(dtype)
            lefts.append(torch.bmm(left.mT, right @ carriers.right.mT.to(dtype)))
            rights.append(torch.bmm((left @ carriers.left.to(dtype)).mT, right))
        else:
            every = slice(0, shape[0])
            gradients = (
                use.gradients
                if isinstance(use, Dense)
                else use.block(slice(None), every, torch.float32)
            )
            dtype = accumulation_dtype(gradients.dtype)
            lefts.append(gradients.to(dtype) @ carriers.right.mT.to(dtype))
            rights.append(carriers.left.mT.to(dtype) @ gradients.to(dtype))
    # The carriers' rows and columns are orthonormal, so what rounds is no larger than in a weight.
    size = torch.stack([use.size() for use in uses]).sum(0)
    left, right = torch.stack(lefts).sum(0), torch.stack(rights).sum(0)
    return Dense(left, of_terms=size), Dense(right, of_terms=size)
