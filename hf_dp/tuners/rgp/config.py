"""RGP: low-rank carriers of weight gradients (Yu et al. 2021, arXiv 2106.09352), a baseline of Li
et al."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from hf_dp._validate import integer, invalid, positive
from hf_dp.clipping.low_rank import LEFT, RIGHT, Carriers
from hf_dp.tuners.selection import SelectionConfig, candidates, register
from hf_dp.tuners.single_entries.config import InPlace


@dataclass
class RgpConfig(SelectionConfig):
    """The weight matrices of linear layers train through carriers of this rank, the head and
    ``modules_to_save`` whole.

    Embeddings, biases and norms are frozen, as in section 5 there. Trains in place; a whole
    checkpoint is saved.

    Args: rank: r, at least 1. power_iterations: for each step's carriers, at least 1.
        learning_rate_scale: the weights' learning rate / that of what trains whole.
    """

    rank: int = field(default=1)
    power_iterations: int = field(default=1)
    learning_rate_scale: float = field(default=1.0)

    method: ClassVar[str] = "rgp"

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("rank", self.rank, 1)
        integer("power_iterations", self.power_iterations, 1)
        positive("learning_rate_scale", self.learning_rate_scale)

    def weights(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The matrices with carriers, by name: of layers, not looked up in.

        Raises: InvalidArgumentError for a rank above the smallest side of one.
        """
        looked_up = {
            p
            for m in model.modules()
            if isinstance(m, nn.Embedding)
            for p in m.parameters(recurse=False)
        }
        allowed = set(candidates(model, self)) - looked_up
        found = {n: p for n, p in model.named_parameters() if p in allowed and p.dim() == 2}
        smallest = min((min(parameter.shape) for parameter in found.values()), default=0)
        if self.rank > smallest:
            raise invalid(
                "rank",
                self.rank,
                f"to be at most {smallest}, the smallest side of a weight matrix",
                "Lower it.",
            )
        return found


register(RgpConfig, InPlace)


@torch.no_grad()
def carriers(weight: Tensor, start: Tensor, rank: int, iterations: int) -> Carriers:
    """Carriers along the historical update ``weight - start``, or along the weight while there is
    none.

    Power iteration from a random start (algorithm 2): the update is a function of what was
    released, so this is free.
    """
    update = (weight - start).float()
    if not bool(update.any()):
        update = weight.float()
    right = torch.randn(rank, weight.shape[1], device=weight.device)
    for _ in range(iterations):
        left = _orthonormal(update @ right.mT)
        right = _orthonormal(update.mT @ left).mT
    return Carriers(left, right)


def _orthonormal(columns: Tensor) -> Tensor:
    return torch.linalg.qr(columns).Q


def weight_gradients(
    noised: Mapping[str, Tensor], by_name: Mapping[str, Carriers]
) -> dict[str, Tensor]:
    """Released gradients with those of carriers replaced by the weights'."""
    found = dict(noised)
    for name, each in by_name.items():
        of_left, of_right = found.pop(name + LEFT), found.pop(name + RIGHT)
        found[name] = Carriers(each.left.to(of_left.dtype), each.right.to(of_left.dtype)).gradient(
            of_left, of_right
        )
    return found
