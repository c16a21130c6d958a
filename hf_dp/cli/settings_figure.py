"""The figure of a sweep over its settings: curves, a heat map, or bars."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_dp._plotting import legend_beside, line_over_seeds, number_axis, panels, spread
from hf_dp.cli.cells import Cell, in_words
from hf_dp.cli.points import Points, draw_points, read_cells, read_points
from hf_dp.errors import ConfigError

Results = Mapping[Cell, dict[str, Any]]
# label -> place on the horizontal axis -> the values of the seeds
Curves = dict[str, dict[float, list[float]]]
# (row, column) -> the values of the seeds
Cells = dict[tuple[float, float], list[float]]


def plot_sweep(results: Results, metric: str, path: str, beside: str | None = None) -> None:
    """Plot curves over one number, a heat map over two, else a bar for each combination.

    There is a curve for each combination of the settings that are no numbers. Curves and bars show
    the spread of the seeds, from the smallest to the largest.

    Args:
        beside: a CSV file with points to show beside them (:func:`hf_dp.cli.points.read_points`);
            in the cells of a heat map, with the columns of both settings
            (:func:`hf_dp.cli.points.read_cells`).

    Raises: ConfigError for points that this figure cannot show.
    """
    varied = _varied(results)
    if varied is None:
        return _plot_bars(results, metric, path, beside)
    numbers, words = varied
    if len(numbers) == 1:
        curves: Curves = {}
        for cell, result in results.items():
            label = " ".join(_word(key, cell.settings[key], len(words)) for key in words)
            places = curves.setdefault(label, {})
            places.setdefault(cell.settings[numbers[0]], []).append(result["metrics"][metric])
        return _plot_curves(numbers[0], metric, curves, path, beside)
    if len(numbers) == 2 and not words:
        found: Cells = {}
        for cell, result in results.items():
            row, column = (cell.settings[name] for name in numbers)
            found.setdefault((row, column), []).append(result["metrics"][metric])
        return _plot_heat_map((numbers[0], numbers[1]), metric, found, path, beside)
    _plot_bars(results, metric, path, beside)


def _varied(results: Results) -> tuple[list[str], list[str]] | None:
    """Return which settings are numbers and which are not; None where cells set different keys."""
    first, *others = results
    if any(list(cell.settings) != list(first.settings) for cell in others):
        return None
    numbers = [
        key
        for key in first.settings
        if all(type(cell.settings[key]) in (int, float) for cell in results)  # no bool
    ]
    return numbers, [key for key in first.settings if key not in numbers]


def _word(key: str, value: Any, settings: int) -> str:
    """Return a setting in words; the only one needs no name."""
    return in_words(value) if settings == 1 else f"{key}={in_words(value)}"


def _plot_curves(name: str, metric: str, curves: Curves, path: str, beside: str | None) -> None:
    points = None if beside is None else read_points(beside, name, metric)
    several = len(curves) > 1 or points is not None
    figure, (axes,) = panels(1, **({"width": 6.5, "height": 4.2} if several else {}))
    for label, numbers in curves.items():
        line_over_seeds(axes, numbers, label)
    ticks = {place for numbers in curves.values() for place in numbers}
    if points is not None:
        draw_points(axes, points, list(curves))
        ticks |= points.places
    number_axis(axes, sorted(ticks))
    axes.set_xlabel(name)
    axes.set_ylabel(metric)
    if several:
        legend_beside(axes)
    figure.savefig(path, dpi=150)


def _plot_heat_map(
    names: tuple[str, str], metric: str, numbers: Cells, path: str, beside: str | None
) -> None:
    others = {} if beside is None else read_cells(beside, names, metric)
    rows, columns = (sorted({key[axis] for key in {*numbers, *others}}) for axis in (0, 1))
    means = [
        [statistics.mean(numbers.get((row, column), [math.nan])) for column in columns]
        for row in rows
    ]
    figure, (axes,) = panels(1, width=1.0 * len(columns) + 2.5, height=0.6 * len(rows) + 1.5)
    image = axes.imshow(means, aspect="auto", cmap="viridis")
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            lines = [f"{means[i][j]:.4g}"] if (row, column) in numbers else []
            lines += [f"({others[row, column]:.4g})"] if (row, column) in others else []
            # viridis is dark below its middle; a cell without a value of ours is white
            dark = (row, column) in numbers and image.norm(means[i][j]) < 0.5
            axes.text(
                j, i, "\n".join(lines), ha="center", va="center", fontsize=8,
                color="white" if dark else "black",
            )  # fmt: skip
    axes.set_yticks(range(len(rows)), [f"{row:g}" for row in rows])
    axes.set_xticks(range(len(columns)), [f"{column:g}" for column in columns])
    axes.set_ylabel(names[0])
    axes.set_xlabel(names[1])
    if beside is not None:
        axes.set_title(f"in parentheses: {Path(beside).stem}", fontsize=9)
    figure.colorbar(image, label=metric)
    figure.savefig(path, dpi=150)


def _plot_bars(results: Results, metric: str, path: str, beside: str | None) -> None:
    groups: dict[str, list[float]] = {}
    for cell, found in results.items():
        groups.setdefault(_bar(cell), []).append(found["metrics"][metric])
    points = None if beside is None else _of_bars(read_points(beside, None, metric), list(groups))
    figure, (axes,) = panels(1, width=6.5, height=0.5 * len(groups) + 1.5)
    means = [statistics.mean(values) for values in groups.values()]
    axes.barh(
        range(len(groups)),
        means,
        xerr=spread(list(groups.values())),
        color="tab:blue",
        height=0.6,
        capsize=3,
    )
    if points is not None:
        rows = [
            (value, list(groups).index(label)) for label, ((_, value),) in points.values.items()
        ]
        axes.plot(
            *zip(*rows, strict=True), linestyle="none", marker="D", markerfacecolor="white",
            color="black", label=points.name,
        )  # fmt: skip
        legend_beside(axes)
    axes.set_yticks(range(len(groups)), list(groups))
    axes.invert_yaxis()
    axes.set_xlabel(metric)
    lowest = [min(v) for v in groups.values()]
    lowest += [] if points is None else [value for ((_, value),) in points.values.values()]
    axes.set_xlim(left=max(0.0, min(lowest) - 0.1))
    figure.savefig(path)


def _bar(cell: Cell) -> str:
    """Return the label of a bar: its settings in words; the only one needs no name."""
    words = [_word(key, value, len(cell.settings)) for key, value in cell.settings.items()]
    return " ".join(words) or "recipe"


def _of_bars(points: Points, bars: Sequence[str]) -> Points:
    """Return the points. Raises: ConfigError for one that belongs to no bar, or several to one."""
    for label, values in points.values.items():
        if label not in bars or len(values) > 1:
            raise ConfigError(
                f"Expected each label of `--plot-beside` to be one of the bars {list(bars)}, once, "
                f"got {label!r} {len(values)} times. Rename it in the file."
            )
    return points
