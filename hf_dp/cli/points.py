"""Points that a figure shows beside those of its runs, such as the values of a paper."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_dp.errors import ConfigError

LABEL = "label"


@dataclass(frozen=True)
class Points:
    """Points of a CSV file.

    Attributes:
        name: the file's name without its ending, which the legend shows.
        values: label -> (place on the horizontal axis, value) of each point; the place is 0 in a
            figure of bars.
    """

    name: str
    values: dict[str, list[tuple[float, float]]]

    @property
    def places(self) -> set[float]:
        """Return where on the horizontal axis there are points."""
        return {place for row in self.values.values() for place, _ in row}


def draw_points(axes: Any, points: Points, colors: Mapping[str, str]) -> None:
    """Draw a dashed line for each label, in its color."""
    for label, row in points.values.items():
        axes.plot(
            *zip(*row, strict=True), linestyle="--", marker="o", markerfacecolor="white",
            color=colors[label], label=f"{points.name}: {label}",
        )  # fmt: skip


def read_points(path: str, over: str | None, metric: str) -> Points:
    """Read a CSV file with the columns ``label``, ``over`` (unless None) and ``metric``.

    Raises: ConfigError for a file that cannot be read, lacks a column, or has no finite number
        where one is needed.
    """
    columns = [LABEL, *([] if over is None else [over]), metric]
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
            found = list(reader.fieldnames or [])
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise ConfigError(f"`--plot-beside` cannot read {path!r}: {problem}") from problem
    if missing := [column for column in columns if column not in found]:
        raise ConfigError(
            f"Expected {path!r} to have the columns {columns}, which this figure shows; it has "
            f"{found} and lacks {missing}. Rename them, or leave `--plot-beside` out."
        )
    values: dict[str, list[tuple[float, float]]] = {}
    for number, row in enumerate(rows, start=2):
        place = 0.0 if over is None else _number(path, number, over, row[over])
        value = _number(path, number, metric, row[metric])
        values.setdefault(row[LABEL], []).append((place, value))
    if not values:
        raise ConfigError(f"{path!r} has no points. Leave `--plot-beside` out.")
    return Points(Path(path).stem, {label: sorted(points) for label, points in values.items()})


def _number(path: str, line: int, column: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(
            f"Expected {column!r} in line {line} of {path!r} to be a number, got {text!r}."
        )
    return value
