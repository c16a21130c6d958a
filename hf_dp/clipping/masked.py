"""Clipping where only some entries of each parameter train (PVAL, PARAM: DP-FROST, section 5)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hf_dp._validate import invalid, one_of
from hf_dp.clipping.engine import ClippingEngine
from hf_dp.clipping.explicit import accumulate, explicit, representable
from hf_dp.clipping.step import ClippedStep
from hf_dp.clipping.uses import full_precision
from hf_dp.clipping.weights import clipping_weights

CLIPPINGS = ("flat", "automatic")


class MaskedEngine(ClippingEngine):
    """As :class:`ClippingEngine` for the entries that a mask keeps: norms over those alone, sums zero elsewhere.

    Args:
        masks: by parameter name, True where an entry trains, of the parameter's shape; a parameter without one trains whole.

    Raises: InvalidArgumentError for a mask of no trainable parameter or of another shape, or clipping other than
        ``"flat"`` and ``"automatic"``.
    """

    def __init__(self, model: nn.Module, masks: Mapping[str, Tensor], clipping_norm: float, clipping: str = "flat"):
        super().__init__(model, clipping_norm, one_of("clipping", clipping, CLIPPINGS))
        self.masks = dict(masks)

    def __enter__(self) -> MaskedEngine:
        super().__enter__()
        for name, mask in self.masks.items():
            parameter = self._parameters.get(name)
            if parameter is None or parameter.shape != mask.shape:
                self.__exit__()
                raise invalid("masks", name, "to be of a trainable parameter, and of its shape")
        self._kept = {parameter: self.masks.get(name) for name, parameter in self._parameters.items()}
        return self

    def _take(self, step: ClippedStep, losses: Tensor) -> Tensor:
        uses = step.records(losses)
        with torch.no_grad(), full_precision():
            squared = torch.zeros(len(losses), dtype=torch.float64, device=losses.device)
            for parameter, of_parameter in uses.items():
                for index in range(len(losses)):
                    _, values = self._masked(parameter, *explicit(of_parameter, parameter, index))
                    squared[index] += values.square().sum(dtype=torch.float64)
            norms = squared.sqrt()
            (weights,) = clipping_weights(self.clipping, norms[None], self.clipping_norm)
            weights = representable(weights)
            step.adding = True
            for parameter in list(uses):
                of_parameter = uses.pop(parameter)
                for index in (weights > 0).nonzero().flatten().tolist():
                    rows, values = self._masked(parameter, *explicit(of_parameter, parameter, index))
                    accumulate(self._sums, parameter, rows, values * float(weights[index]))
        return norms.to(losses.dtype)

    def _masked(self, parameter: nn.Parameter, rows: Tensor | None, values: Tensor) -> tuple[Tensor | None, Tensor]:
        mask = self._kept[parameter]
        if mask is None:
            return rows, values
        # `where`, not a product: an infinite gradient of an entry that does not train is not this example's norm.
        mask = mask if rows is None else mask.view(len(parameter), -1)[rows]
        return rows, torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))
