"""The scales of a run's steps, from the noised gradients (:mod:`hf_dp.plans.scaling`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from hf_dp.clipping.scales import Scale, sides
from hf_dp.distributed.processes import Processes
from hf_dp.plans.scaling import SPREAD, GradientScaling

_ROWS, _COLUMNS = "rows of ", "columns of "
# Squares further below the largest mean square count as this much of it: what is 0 but for rounding
# has no scale of its own.
_LEAST = 1e-12


@dataclass(frozen=True)
class Squares:
    """Mean squares of a parameter's noised gradients: of its rows (m,) and of its columns (n,)."""

    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, gradient: Tensor) -> Self:
        """Return those of one gradient."""
        squares = gradient.double().reshape(sides(gradient.shape)).square()
        return cls(squares.mean(1), squares.mean(0))

    def moved(self, to: Squares, share: float) -> Squares:
        """Return them moved by a share of the way to others."""
        return Squares(self.rows.lerp(to.rows, share), self.columns.lerp(to.columns, share))


class Scales:
    """Moving averages of squares of noised gradients, and the scales that follow from them.

    Attributes: now: the scales of the next step, by the name of a sum; none before the first.
    """

    def __init__(self, rule: GradientScaling, processes: Processes):
        self.rule, self.processes = rule, processes
        self.now: dict[str, Scale] = {}
        self._squares: dict[str, Squares] = {}

    @torch.no_grad()
    def learn(self, noised: Mapping[str, Tensor]) -> None:
        """Take note of the noised gradients of a step, and scale the next ones.

        The main process's numbers are everyone's: processes that add up scaled gradients must agree
        on the scales in every bit, and devices may add in different orders.
        """
        for name, gradient in noised.items():
            found = Squares.of(gradient)
            if (known := self._squares.get(name)) is not None:
                found = known.moved(found, 1 - self.rule.beta)
            same = self.processes.from_main
            self._squares[name] = Squares(same(found.rows), same(found.columns))
        self.now = scales_of(self._squares)

    def kept(self) -> dict[str, Tensor]:
        """Return what :meth:`go_on` takes, by name."""
        found: dict[str, Tensor] = {}
        for name, each in self._squares.items():
            found |= {_ROWS + name: each.rows, _COLUMNS + name: each.columns}
        return found

    def go_on(self, kept: Mapping[str, Tensor], model: nn.Module, device: torch.device) -> None:
        """Go on from what was kept of a run of this model.

        Raises: KeyError where numbers of a parameter that trains are missing; ValueError for those
            that are no mean squares of a parameter.
        """
        squares = {}
        for name, p in model.named_parameters():
            if p.requires_grad or _ROWS + name in kept:
                rows, columns = kept[_ROWS + name], kept[_COLUMNS + name]
                if (*rows.shape, *columns.shape) != sides(p.shape):
                    raise ValueError(name)
                numbers = torch.cat([rows, columns])
                if not bool((torch.isfinite(numbers) & (numbers >= 0)).all()):
                    raise ValueError(name)
                squares[name] = Squares(rows.to(device), columns.to(device))
        self._squares, self.now = squares, scales_of(squares)


def scales_of(squares: Mapping[str, Squares]) -> dict[str, Scale]:
    """Return the scales of parameters that follow from the mean squares of their gradients.

    A number's square is estimated as ``v = rows columns^T / mean(rows)``, and s = 1 / sqrt(v) has
    three factors: one for each parameter, those of its rows, and those of its columns, each set
    with a geometric mean of 1. Each is limited to sqrt(SPREAD) times more or less than 1, so scales
    are at most SPREAD^3 times apart. All are then multiplied by what makes the mean of s^2 be 1.
    """
    levels: dict[str, float] = {}
    factors: dict[str, Scale] = {}
    largest = max((float(each.rows.mean()) for each in squares.values()), default=0.0)
    least = largest * _LEAST or 1.0
    for name, each in sorted(squares.items()):  # sums that round are the same after a resume
        rows, columns = (v.clamp_min(least).log().mul(-0.5) for v in (each.rows, each.columns))
        of_mean = 0.5 * math.log(max(float(each.rows.mean()), least))
        levels[name] = float(rows.mean() + columns.mean()) + of_mean
        factors[name] = Scale(_limited(rows - rows.mean()), _limited(columns - columns.mean()))
    middle = sum(levels.values()) / max(len(levels), 1)
    total, numbers = 0.0, 0
    for name, scale in factors.items():
        level = float(_limited(torch.tensor(levels[name] - middle, dtype=torch.float64)))
        factors[name] = Scale(scale.rows * level, scale.columns)
        total += float(factors[name].rows.square().sum() * scale.columns.square().sum())
        numbers += len(scale.rows) * len(scale.columns)
    one = math.sqrt(numbers / total) if total else 1.0
    return {name: Scale(scale.rows * one, scale.columns) for name, scale in factors.items()}


def _limited(logs: Tensor) -> Tensor:
    """Return the exponentials, not further from 1 than they may be."""
    most = 0.5 * math.log(SPREAD)
    return logs.clamp(-most, most).exp()
