"""PVAL and PARAM: single entries of a weight train while the others stay as they are.

Both are baselines of DP-FROST (section 5). They are not adapters: entries train in place, and a
whole checkpoint is saved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from hf_dp._validate import in_unit_interval, invalid
from hf_dp.errors import UnsupportedModelError
from hf_dp.plans.selection import SelectionPlan
from hf_dp.tuners.selection import SelectionConfig, candidates, plan_for, register


@dataclass
class MaskConfig(SelectionConfig):
    """Which single parameters train, at most ``unfreeze_ratio`` of them.

    A new head and ``modules_to_save`` train in full.

    Args:
        unfreeze_ratio: gamma in (0, 1].
    """

    unfreeze_ratio: float = field(default=0.25)

    def __post_init__(self) -> None:
        super().__post_init__()
        in_unit_interval("unfreeze_ratio", self.unfreeze_ratio, one=True)

    def candidate_names(self, model: nn.Module) -> list[str]:
        """List the names of the parameters whose entries may be selected."""
        allowed = set(candidates(model, self))
        return [name for name, parameter in model.named_parameters() if parameter in allowed]


class InPlace:
    """Stands where PEFT looks for the adapter of a method that has none."""

    prefix = "mask_"

    def __init__(self, *args: Any, **kwargs: Any):
        raise UnsupportedModelError(
            "This method trains in place, not as an adapter. Pass its configuration to "
            "DPTrainer(peft_config=...)."
        )


@dataclass
class PvalConfig(MaskConfig):
    """PVAL (Luo et al. 2021): the single parameters with the largest absolute value.

    It looks at no data, so it costs no privacy.
    """

    method: ClassVar[str] = "pval"

    def masks(self, model: nn.Module) -> dict[str, Tensor]:
        """Return a mask for each parameter name, True where an entry trains."""
        names = dict(model.named_parameters())
        return largest(
            {name: names[name].detach() for name in self.candidate_names(model)},
            self.unfreeze_ratio,
        )


@dataclass
class ParamConfig(MaskConfig):
    """PARAM: the single parameters with the largest noisy gradient, from one Poisson sample.

    Args:
        selection_budget_ratio, selection_sample_rate, selection_clipping_norm (L2),
            selection_noise_multiplier: as in :class:`hf_dp.tuners.frost.config.FrostConfig`.
    """

    selection_budget_ratio: float = field(default=0.1)
    selection_sample_rate: float = field(default=0.02)
    selection_clipping_norm: float | None = field(default=None)
    selection_noise_multiplier: float | None = field(default=None)

    method: ClassVar[str] = "param"

    def __post_init__(self) -> None:
        super().__post_init__()
        in_unit_interval("selection_budget_ratio", self.selection_budget_ratio)

    def selection_plan(self, clipping_norm: float) -> SelectionPlan:
        """Return what the selection will release.

        Args:
            clipping_norm: the run's; ``selection_clipping_norm`` takes its place where it is set.
        """
        return plan_for(self, clipping_norm, "gradient", iterations=1, norm_order=2)


register(PvalConfig, InPlace)
register(ParamConfig, InPlace)


def largest(values: Mapping[str, Tensor], ratio: float) -> dict[str, Tensor]:
    """Return masks of the ``floor(ratio n)`` entries, of all n, with the largest absolute value.

    Raises: InvalidArgumentError when that number is 0.
    """
    flat = torch.cat([value.abs().flatten().float() for value in values.values()])
    count = math.floor(ratio * len(flat))
    if count == 0:
        raise invalid(
            "unfreeze_ratio",
            ratio,
            f"to leave room for one of {len(flat):,} parameters",
            "Raise it.",
        )
    kept = torch.zeros(len(flat), dtype=torch.bool, device=flat.device)
    kept[flat.topk(count, sorted=False).indices] = True
    parts = kept.split([value.numel() for value in values.values()])
    return {
        name: part.view(value.shape)
        for (name, value), part in zip(values.items(), parts, strict=True)
    }


def packed(masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return masks as bits, for a file; :func:`unpacked` reads them back."""
    return {
        name: torch.from_numpy(np.packbits(mask.flatten().cpu().numpy()))
        for name, mask in masks.items()
    }


def unpacked(bits: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Read back what :func:`packed` wrote for this model.

    Raises: InvalidArgumentError when the masks are of another model.
    """
    names = dict(model.named_parameters())
    masks = {}
    for name, packed_bits in bits.items():
        if name not in names or len(packed_bits) != -(-names[name].numel() // 8):
            _refuse(name)
        values = np.unpackbits(packed_bits.numpy(), count=names[name].numel()).astype(bool)
        masks[name] = torch.from_numpy(values).view(names[name].shape).to(names[name].device)
    return masks


def _refuse(name: str) -> NoReturn:
    raise invalid(
        "masks",
        name,
        "to belong to a parameter of this model",
        "The checkpoint is of another model: resume with the model that the run was started with.",
    )
