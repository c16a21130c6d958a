"""Small per-example gradients (biases, norms) side by side in one matrix.

A transformer has more vectors than matrices, and each vector needs its own few operations on a few
thousand numbers: on short batches, starting those operations took longer than the arithmetic. Side
by side they need one norm and one matrix-vector product.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_dp.clipping.gradients import Dense, PerExampleGradient, Weights

# Numbers in one example's gradient; copying a larger one costs more than the operations saved.
_LARGEST = 2**14


@dataclass
class Bundle:
    """The per-example gradients of several parameters that are clipped together.

    Attributes:
        gradient: theirs, side by side, (b, sum of their sizes).
    """

    parameters: list[nn.Parameter]
    gradient: Dense


def zero_sum(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return zeros of the type of sums over physical batches: float64.

    A sum must not depend on its history. A row that is left out changes which batches follow which;
    in float32 the rounding of 2,596 additions differed by 1.39 C.
    """
    return torch.zeros(tuple(shape), dtype=torch.float64, device=device)


class RunningSums(dict[nn.Parameter, Tensor]):
    """The sums of parameters over physical batches, in float64.

    Those of a bundle stay side by side until the end, so that a batch is added by one operation.
    """

    def of(self, parameter: nn.Parameter, device: torch.device) -> Tensor:
        """Return the running sum of a parameter, to be added to in place; at first zeros."""
        if parameter not in self:
            self[parameter] = zero_sum(parameter.shape, device)
        return self[parameter]

    def __init__(self) -> None:
        super().__init__()
        self._side_by_side: dict[tuple[nn.Parameter, ...], Tensor] = {}

    def add_bundle(self, bundle: Bundle, weights: Weights) -> None:
        """Add the weighted gradients of a bundle."""
        key, gradients = tuple(bundle.parameters), bundle.gradient.gradients
        if key not in self._side_by_side:
            self._part_with(set(key))
            self._side_by_side[key] = zero_sum(gradients.shape[1:], gradients.device)
        bundle.gradient.add_weighted_sum(self._side_by_side[key], weights)

    def by_parameter(self) -> dict[nn.Parameter, Tensor]:
        """Return every sum under its own parameter; those of bundles are views of one tensor."""
        sums = dict(self)
        for parameters, total in self._side_by_side.items():
            for parameter, part in zip(parameters, _split(total, parameters), strict=True):
                # A batch of another length may have brought this parameter's gradients otherwise.
                sums[parameter] = sums[parameter] + part if parameter in sums else part
        return sums

    def _part_with(self, parameters: set[nn.Parameter]) -> None:
        """Give bundles that share some of these parameters a sum for each parameter.

        Otherwise a model that uses other parameters in each batch would keep a sum for each batch.
        """
        for key in [key for key in self._side_by_side if not parameters.isdisjoint(key)]:
            for parameter, part in zip(key, _split(self._side_by_side.pop(key), key), strict=True):
                known = self.get(parameter)
                self[parameter] = part.clone() if known is None else known.add_(part)


def _split(total: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    parts = total.split([parameter.numel() for parameter in parameters])
    return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]


def bundled(
    uses: dict[nn.Parameter, list[PerExampleGradient]],
    groups: Mapping[nn.Parameter, int],
    apart: Container[nn.Parameter],
) -> list[Bundle]:
    """Take every parameter with one small dense gradient out of ``uses``, except those ``apart``.

    Return a bundle for each group, dtype and device.
    """
    members: dict[tuple[int, torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter, (first, *others) in uses.items():
        small = isinstance(first, Dense) and not others and parameter.numel() <= _LARGEST
        if small and parameter not in apart:
            assert isinstance(first, Dense)
            key = (groups[parameter], first.gradients.dtype, first.gradients.device)
            members.setdefault(key, []).append(parameter)
    bundles = []
    for parameters in members.values():
        dense = [use for p in parameters for use in uses.pop(p) if isinstance(use, Dense)]
        gradients = torch.cat([use.gradients.flatten(1) for use in dense], 1)
        known = any(use.of_terms is not None for use in dense)
        sizes = [use.size() for use in dense] if known else []
        size = torch.linalg.vector_norm(torch.stack(sizes), dim=0) if known else None
        bundles.append(Bundle(parameters, Dense(gradients, owned=True, of_terms=size)))
    return bundles
