"""Parameters chosen without looking at the data, which costs no privacy.

The choices are random partitions, the last blocks, biases, or the head alone. They are the
baselines of Li et al. (top-2 blocks), DP-FROST (Rand) and Bu et al. 2022 (DP-BitFiT, arXiv
2210.00036).
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn

from hf_dp._validate import in_unit_interval, integer, invalid
from hf_dp.errors import UnsupportedModelError
from hf_dp.tuners.frost.partition import partitions
from hf_dp.tuners.frost.select import refuse_too_small
from hf_dp.tuners.selection import SelectionConfig, candidates, register

BLOCK = re.compile(r"^(.*?\.(?:layers?|h|blocks?))\.(\d+)\.")


@register
@dataclass
class RandomConfig(SelectionConfig):
    """Partitions drawn at random (DP-FROST's Rand), at most ``unfreeze_ratio`` of all numbers.

    Args:
        unfreeze_ratio: in (0, 1].
        selection_seed: seed of the draw, which is public; by default ``DPTrainer`` sets it to that
            of its run, so that runs with other seeds draw other matrices. Elsewhere it is 0. A
            resume by another seed is refused, unless it is set to that of the run.
        granularity: as in :func:`hf_dp.tuners.frost.partition.partitions`.
    """

    unfreeze_ratio: float = field(default=0.25)
    selection_seed: int | None = field(default=None)
    granularity: str = field(default="weight")

    method: ClassVar[str] = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        in_unit_interval("unfreeze_ratio", self.unfreeze_ratio, one=True)
        if self.selection_seed is not None:
            integer("selection_seed", self.selection_seed, 0)

    def choose(self, model: nn.Module) -> list[str]:
        parts = partitions(model, self.granularity, among=set(candidates(model, self)))
        refuse_too_small(parts, self.unfreeze_ratio)
        left = self.unfreeze_ratio * sum(part.size for part in parts)
        chosen: list[str] = []
        for part in random.Random(self.selection_seed or 0).sample(parts, len(parts)):
            if part.size <= left:
                chosen += part.parameters
                left -= part.size
        return chosen


@register
@dataclass
class TopBlocksConfig(SelectionConfig):
    """The last ``blocks`` transformer blocks (Li et al., table 2: top-2), and a classifier's head.

    Args:
        blocks: how many, at least 1.
    """

    blocks: int = field(default=2)

    method: ClassVar[str] = "top_blocks"

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("blocks", self.blocks, 1)

    def choose(self, model: nn.Module) -> list[str]:
        allowed = set(candidates(model, self))
        found: dict[str, set[int]] = {}
        for name, parameter in model.named_parameters():
            match = BLOCK.match(name)
            if match and parameter in allowed:
                found.setdefault(match[1], set()).add(int(match[2]))
        if not found:
            raise UnsupportedModelError(
                f"No numbered transformer blocks were found in {type(model).__name__}. Use "
                "RandomConfig or BitFitConfig."
            )
        stem = max(found, key=lambda stack: len(found[stack]))
        last = sorted(found[stem])[-self.blocks :]
        if len(last) < self.blocks:
            raise invalid(
                "blocks", self.blocks, f"to be at most the model's {len(last)}", "Lower it."
            )
        kept = tuple(f"{stem}.{number}." for number in last)
        return [
            name for name, p in model.named_parameters() if name.startswith(kept) and p in allowed
        ]


@register
@dataclass
class BitFitConfig(SelectionConfig):
    """All biases (BitFiT), and a classifier's head."""

    method: ClassVar[str] = "bitfit"

    def choose(self, model: nn.Module) -> list[str]:
        allowed = set(candidates(model, self))
        found = [
            name for name, p in model.named_parameters() if name.endswith("bias") and p in allowed
        ]
        if not found:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no bias to train. Use RandomConfig or HeadConfig."
            )
        return found


@register
@dataclass
class HeadConfig(SelectionConfig):
    """A classifier's head or ``modules_to_save`` alone; everything else is frozen."""

    method: ClassVar[str] = "head"

    def choose(self, model: nn.Module) -> list[str]:
        if len(candidates(model, self)) == sum(p.requires_grad for p in model.parameters()):
            raise UnsupportedModelError(
                f"{type(model).__name__} has no head that PEFT knows (with task_type SEQ_CLS). "
                "Name the head in `modules_to_save`."
            )
        return []
