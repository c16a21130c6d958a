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

from hf_dp._validate import integer, invalid
from hf_dp.errors import UnsupportedModelError
from hf_dp.tuners.selection import RatioConfig, SelectionConfig, always_trained, register

BLOCK = re.compile(r"^(.*?\.(?:layers?|h|blocks?))\.(\d+)\.")


@register
@dataclass
class RandomConfig(RatioConfig):
    """Partitions drawn at random (DP-FROST's Rand), at most ``unfreeze_ratio`` of all numbers.

    Args:
        selection_seed: seed of the draw, which is public; by default ``DPTrainer`` sets it to that
            of its run, so that runs with other seeds draw other matrices. Elsewhere it is 0. A
            resume with another seed is refused, unless this is set to that of the run.
    """

    selection_seed: int | None = field(default=None)

    method: ClassVar[str] = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.selection_seed is not None:
            integer("selection_seed", self.selection_seed, 0)

    def choose(self, model: nn.Module) -> list[str]:
        parts = self.candidate_partitions(model)
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
        names = list(self.candidates(model))
        found: dict[str, set[int]] = {}
        for match in filter(None, map(BLOCK.match, names)):
            found.setdefault(match[1], set()).add(int(match[2]))
        if not found:
            raise _nothing(model, "numbered transformer blocks")
        # Of equal stacks the last: a decoder's.
        stem = max(reversed(found), key=lambda stack: len(found[stack]))
        last = sorted(found[stem])[-self.blocks :]
        if len(last) < self.blocks:
            expected = f"to be at most the model's {len(last)}"
            raise invalid("blocks", self.blocks, expected, "Lower it.")
        kept = tuple(f"{stem}.{number}." for number in last)
        return [name for name in names if name.startswith(kept)]


@register
@dataclass
class BitFitConfig(SelectionConfig):
    """All biases (BitFiT), and a classifier's head."""

    method: ClassVar[str] = "bitfit"

    def choose(self, model: nn.Module) -> list[str]:
        found = [name for name in self.candidates(model) if name.endswith("bias")]
        if not found:
            raise _nothing(model, "bias to train")
        return found


@register
@dataclass
class HeadConfig(SelectionConfig):
    """A classifier's head or ``modules_to_save`` alone; everything else is frozen."""

    method: ClassVar[str] = "head"

    def choose(self, model: nn.Module) -> list[str]:
        if not always_trained(model, self):
            raise _nothing(model, "head that PEFT knows")
        return []


def _nothing(model: nn.Module, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} has no {what}. Choose by another configuration, or name the "
        "modules that are to train in `modules_to_save`."
    )
