"""What every figure needs: matplotlib where it is installed, and a clear message where it is
not."""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_dp import _validate

_KINDS = (".png", ".pdf", ".svg")


def require_matplotlib(path: str) -> None:
    """Raise InvalidArgumentError for another kind of file, or where matplotlib is not installed.

    The message names the extra to install. Call it before anything is computed.
    """
    if Path(path).suffix.lower() not in _KINDS:
        raise _validate.invalid(
            "plot", path, f"to end in one of {list(_KINDS)}", "That decides what is written."
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise _validate.invalid(
            "plot", path, "with matplotlib installed", "Run `pip install hf-dp[plot]`."
        )


def panels(count: int, width: float = 4.5, height: float = 3.6) -> tuple[Any, list[Any]]:
    """Return a figure and its ``count`` axes side by side, without upper and right edges."""
    from matplotlib.figure import Figure  # not pyplot: no display is touched

    figure = Figure(figsize=(width * count, height), layout="constrained")
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def line_over_seeds(axes: Any, points: Mapping[float, Sequence[float]], label: str) -> None:
    """Draw the means of the seeds at each place, with the spread of the seeds as error bars."""
    places = sorted(points)
    values = [points[place] for place in places]
    axes.errorbar(
        places, [statistics.mean(each) for each in values], yerr=spread(values),
        marker="o", capsize=3, label=label,
    )  # fmt: skip


def far_apart(numbers: Collection[float]) -> bool:
    """Return whether positive numbers span a factor of 8, which a logarithmic axis shows better."""
    return min(numbers) > 0 and max(numbers) >= 8 * min(numbers)


def number_axis(axes: Any, places: Sequence[float]) -> None:
    """Mark these places, which rise, on a logarithmic horizontal axis if they are far apart.

    Of more than ten, only every second, third, ... is marked: the numbers would overlap.
    """
    if far_apart(places):
        marked = places[:: math.ceil(len(places) / 10)]
        axes.set_xscale("log", base=2)
        axes.set_xticks(marked, [f"{place:g}" for place in marked])
        axes.set_xticks([], minor=True)


def spread(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return how far the smallest and the largest of each are from their mean, for error bars."""
    means = [statistics.mean(each) for each in values]
    return [
        [mean - min(each) for mean, each in zip(means, values, strict=True)],
        [max(each) - mean for mean, each in zip(means, values, strict=True)],
    ]


def legend_beside(axes: Any) -> None:
    """Put the legend to the right of the axes, where it hides no point."""
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
