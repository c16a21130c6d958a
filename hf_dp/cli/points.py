"""Points that a figure shows beside those of its runs, such as the values of a paper."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
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


def read_points(path: str, over: str | None, metric: str) -> Points:
    """Read a CSV file with the columns ``label``, ``over`` (unless None) and ``metric``.

    Raises: ConfigError for a file that cannot be read, lacks a column, or has no finite number
        where one is needed.
    """
    numbers = [*([] if over is None else [over]), metric]
    values: dict[str, list[tuple[float, float]]] = {}
    for label, found in _rows(path, [LABEL], numbers):
        *place, value = found
        values.setdefault(label[0], []).append((place[0] if place else 0.0, value))
    return Points(Path(path).stem, {label: sorted(points) for label, points in values.items()})


def read_cells(path: str, names: tuple[str, str], metric: str) -> dict[tuple[float, float], float]:
    """Read the values of a heat map: a CSV file with the columns of both settings and ``metric``.

    Raises: ConfigError as :func:`read_points` does, and for a cell that comes twice.
    """
    values: dict[tuple[float, float], float] = {}
    for _, (row, column, value) in _rows(path, [], [*names, metric]):
        if (row, column) in values:
            raise ConfigError(
                f"Expected each pair of {list(names)} once in {path!r}, got {(row, column)} twice."
            )
        values[row, column] = value
    return values


def draw_points(axes: Any, points: Points, labels: Sequence[str]) -> None:
    """Draw points beside curves that were drawn with ``labels``, in this order.

    A label has the same color in both.
    """
    order = list(dict.fromkeys([*labels, *points.values]))  # matplotlib's own
    for label, row in points.values.items():
        axes.plot(
            *zip(*row, strict=True), linestyle="--", marker="o", markerfacecolor="white",
            color=f"C{order.index(label)}", label=f"{points.name}: {label}",
        )  # fmt: skip


def _rows(
    path: str, words: list[str], numbers: list[str]
) -> list[tuple[list[str], tuple[float, ...]]]:
    """Return the columns of words and of numbers of each row. Raises: ConfigError."""
    columns = [*words, *numbers]
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
    if not rows:
        raise ConfigError(f"{path!r} has no points. Leave `--plot-beside` out.")
    return [
        (
            [row[word] for word in words],
            tuple(_number(path, line, column, row[column]) for column in numbers),
        )
        for line, row in enumerate(rows, start=2)
    ]


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
