"""RGP: low-rank carriers of weight gradients (Yu et al. 2021, arXiv 2106.09352).

It is one of the baselines of Li et al.
"""

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
    """RGP: the weight matrices of linear layers train through low-rank carriers.

    The head and ``modules_to_save`` train in full. Embeddings, biases and norms are frozen, as in
    section 5 of the paper. The model trains in place, and a whole checkpoint is saved.

    Args:
        rank: r, at least 1.
        power_iterations: how many make the carriers of a step, at least 1.
        learning_rate_scale: the learning rate of the weight matrices, divided by that of what
            trains in full.
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
        """Return the matrices that get carriers, by name; embeddings are not among them.

        Raises: InvalidArgumentError for a rank above the smallest side of a matrix.
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
    """Return carriers along the historical update ``weight - start``.

    While there is no update yet, they are carriers along the weight. They come from a power
    iteration with a random start (algorithm 2). The update is a function of what was released, so
    they cost no privacy.
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
    """Return the released gradients, with those of carriers replaced by those of the weights.

    Equal numbers give equal bits, however they lie in memory, so that all processes get the same:
    where one has drawn no example, its sums are laid out by rows, those of the others perhaps by
    columns, and a matrix product adds up in another order then.
    """
    found = dict(noised)
    for name, each in by_name.items():
        of_left, of_right = (
            _by_rows(found.pop(name + side)).to(each.left.dtype) for side in (LEFT, RIGHT)
        )
        found[name] = each.gradient(of_left, of_right)
    return found


def _by_rows(factor: Tensor) -> Tensor:
    # A copy in any case: a product may round by where its factors begin in a shared buffer, too.
    return factor.clone(memory_format=torch.contiguous_format)
