"""The scales of a run's steps, from the noised gradients (:mod:`hf_dp.plans.scaling`)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hf_dp.clipping.scales import Scale, sides
from hf_dp.distributed.processes import Processes
from hf_dp.plans.scaling import SPREAD

# Mean squares of a parameter's gradients: of its rows (m,) and of its columns (n,), in float64, and
# kept on the CPU, where their many small sums wait for no device.
Squares = tuple[Tensor, Tensor]
_ROWS, _COLUMNS = "rows of ", "columns of "
# Squares further below the largest mean square count as this much of it: what is 0 but for rounding
# has no scale of its own.
_LEAST = 1e-12


def mean_squares(gradient: Tensor) -> Squares:
    """Return those of one gradient."""
    squares = gradient.double().reshape(sides(gradient.shape)).square()
    return squares.mean(1), squares.mean(0)


class Scales:
    """Moving averages, with the decay ``beta``, of squares of noised gradients; and the scales that
    follow, ``now`` those of the next step by the name of a sum, none before the first."""

    def __init__(self, beta: float, processes: Processes):
        self.beta, self.processes = beta, processes
        self.now: dict[str, Scale] = {}
        self._squares: dict[str, Squares] = {}

    @torch.no_grad()
    def learn(self, noised: Mapping[str, Tensor]) -> None:
        """Take note of a step's noised gradients, and scale the next ones. Processes must agree on
        scales in every bit, and devices add in different orders: so all take the main one's."""
        for name, gradient in noised.items():
            new = [self.processes.from_main(each).cpu() for each in mean_squares(gradient)]
            old = self._squares.get(name, new)  # the first ones are the average
            rows, columns = (a.lerp(b, 1 - self.beta) for a, b in zip(old, new, strict=True))
            self._squares[name] = rows, columns
        self.now = scales_of(self._squares)

    def kept(self) -> dict[str, Tensor]:
        """Return what :meth:`go_on` takes, by name."""
        rows = {_ROWS + name: each[0] for name, each in self._squares.items()}
        return rows | {_COLUMNS + name: each[1] for name, each in self._squares.items()}

    def go_on(self, kept: Mapping[str, Tensor], model: nn.Module) -> None:
        """Go on from what was kept of a run of this model. Raises: KeyError where numbers of a
        parameter that trains are missing; ValueError for those that are no mean squares of it."""
        squares = {}
        for name, p in model.named_parameters():
            if p.requires_grad or _ROWS + name in kept:
                squares[name] = rows, columns = kept[_ROWS + name], kept[_COLUMNS + name]
                numbers = torch.cat([rows, columns])
                fits = (*rows.shape, *columns.shape) == sides(p.shape)
                if not fits or not bool((torch.isfinite(numbers) & (numbers >= 0)).all()):
                    raise ValueError(name)
        self._squares, self.now = squares, scales_of(squares)


def scales_of(squares: Mapping[str, Squares]) -> dict[str, Scale]:
    """Return the scales of parameters that follow from the mean squares of their gradients.

    A number's square is estimated as ``v = rows columns^T / mean(rows)``, and s = 1 / sqrt(v) has
    three factors: one for each parameter, those of its rows, and those of its columns, each set
    with a geometric mean of 1. Each is limited to sqrt(SPREAD) times more or less than 1, so scales
    are at most SPREAD^3 times apart. All are then multiplied by what makes the mean of s^2 be 1.
    """
    means = {name: float(rows.mean()) for name, (rows, _) in squares.items()}
    least = max(means.values(), default=0.0) * _LEAST or 1.0
    levels: dict[str, Tensor] = {}
    factors: dict[str, Scale] = {}
    for name in sorted(squares):  # sums that round are the same after a resume
        rows, columns = (v.clamp_min(least).log().mul(-0.5) for v in squares[name])
        levels[name] = rows.mean() + columns.mean() + 0.5 * math.log(max(means[name], least))
        factors[name] = Scale(_limited(rows - rows.mean()), _limited(columns - columns.mean()))
    total, numbers, middle = 0.0, 0, sum(levels.values()) / max(len(levels), 1)
    for name, scale in factors.items():
        rows = scale.rows * _limited(levels[name] - middle)
        factors[name] = Scale(rows, scale.columns)
        total += float(rows.square().sum() * scale.columns.square().sum())
        numbers += len(rows) * len(scale.columns)
    one = math.sqrt(numbers / total) if total else 1.0
    return {name: Scale(scale.rows * one, scale.columns) for name, scale in factors.items()}


def _limited(logs: Tensor) -> Tensor:
    """Return the exponentials, not further from 1 than they may be."""
    most = 0.5 * math.log(SPREAD)
    return logs.clamp(-most, most).exp()
