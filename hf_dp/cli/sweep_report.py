"""Report a sweep: a table, a figure, and what all its private runs cost together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from hf_dp.cli.cells import Cell, in_words
from hf_dp.errors import ConfigError

TIMES_NOTE = (
    "times: of training in the main process, a selection included; epsilon does not cover them"
)


def table(results: dict[Cell, dict[str, Any]]) -> str:
    """Return each combination's metrics: mean over its seeds, and the smallest and largest."""
    lines = []
    for label, rows in _by_label(results).items():
        cells = []
        for metric in sorted({metric for row in rows for metric in row["metrics"]}):
            values = [row["metrics"][metric] for row in rows if metric in row["metrics"]]
            spread = (
                f" ({min(values):.4f} to {max(values):.4f}, {len(values)} seeds)"
                if len(values) > 1
                else ""
            )
            cells.append(f"{metric} {statistics.mean(values):.4f}{spread}")
        cells += [
            f"zero-shot {metric} {value:.4f}"
            for metric, value in sorted(rows[0].get("zero_shot", {}).items())
        ]
        if (size := rows[0].get("size")) is not None:
            cells.append(f"{size.without_embeddings:,} parameters without embeddings")
        cells += _times(rows)
        epsilon = rows[0]["epsilon"]
        without = rows[0].get("status") or "not private"
        cells.append(without if epsilon is None else f"epsilon {epsilon:.3f} a run")
        lines.append(f"{label or 'recipe'}: {'; '.join(cells)}")
    return "\n".join(lines)


def best(results: dict[Cell, dict[str, Any]], score: str) -> str:
    """Return which combination has the best mean over its seeds, in words.

    Raises: ConfigError for a metric that a run lacks.
    """
    means = {}
    for label, rows in _by_label(results).items():
        lacking = [row for row in rows if score not in row["metrics"]]
        if lacking:
            raise ConfigError(
                f"Expected `--best` to be one of {sorted(lacking[0]['metrics'])}, got {score!r}."
            )
        means[label] = statistics.mean(row["metrics"][score] for row in rows)
    chosen = max(means, key=lambda label: signed(score, means[label]))
    return f"best by {score}: {chosen or 'recipe'}: {means[chosen]:.4f}"


def signed(score: str, value: float) -> float:
    """Return a score of which the larger is the better, and one that is not a number is worst."""
    if math.isnan(value):
        return -math.inf
    return -value if score.endswith("perplexity") else value


def _times(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return how long the runs of a combination took: the mean over its seeds, in words."""
    known = [row["times"] for row in rows if row.get("times")]
    said = []
    for part in ("training", "selection"):
        found = [times[part] for times in known if part in times]
        if found:
            wall, processor = (
                statistics.mean(each[kind] for each in found) for kind in ("wall", "processor")
            )
            said.append(f"{part} {wall:.1f} s (processor {processor:.1f} s)")
    return said


def _by_label(results: dict[Cell, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for cell, result in results.items():
        rows.setdefault(cell.label, []).append(result)
    return rows


def spent_together(cells: Sequence[Cell]) -> str:
    """Return what all private runs of the sweep cost on the rows that they share.

    Their ledgers are composed, those of unfinished runs included.
    """
    from hf_dp.accounting import epsilon
    from hf_dp.statement.record import FILE_NAME, read

    folders = [path for cell in cells for path in cell.attempts if (path / FILE_NAME).exists()]
    records = [read(path) for path in folders]
    if not records:
        return ""
    if any(record.insecure_seed for record in records):
        return (
            "some of these runs drew their noise from a fixed seed (insecure_seed): no epsilon "
            "holds for all together"
        )
    if any(not event.established for record in records for event in record.ledger.events):
        return (
            "DP-FP as published is among these runs: no differential privacy guarantee is "
            "established for any of them, nor for all together"
        )
    # A guarantee at the smallest delta holds at every larger one.
    delta = min(record.plan.delta for record in records)
    total = epsilon([event for record in records for event in record.ledger.events], delta, "rdp")
    return (
        f"all {len(records)} private runs together: epsilon {total.rounded_up(3)} at delta "
        f"{delta:g} (rdp, a bound); that is what holds for anyone who sees more than one of them"
    )


def plot_over_zero_shot(results: dict[Cell, dict[str, Any]], path: str) -> None:
    """Plot trained over untrained accuracy (Li et al., figure 8).

    There is a line for each combination of the settings other than ``infilling``.
    """
    from hf_dp._plotting import panels

    lines: dict[str, list[tuple[float, float]]] = {}
    for cell, found in results.items():
        metric = sorted(found["metrics"])[0]
        others = " ".join(
            f"{key}={in_words(value)}" for key, value in cell.settings.items() if key != "infilling"
        )
        if found["zero_shot"]:
            lines.setdefault(others or "infilling", []).append(
                (found["zero_shot"][metric], found["metrics"][metric])
            )
    figure, (axes,) = panels(1)
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.set_xlabel(f"zero-shot {metric}")
    axes.set_ylabel(f"{metric} after training")
    axes.legend(frameon=False)
    figure.savefig(path)


def plot_sweep(results: dict[Cell, dict[str, Any]], path: str) -> None:
    """Plot a curve over one number, a heat map over two, else a bar for each combination.

    Curves and bars show the spread of the seeds.
    """
    metric = sorted(next(iter(results.values()))["metrics"])[0]
    names = list(next(iter(results)).settings)
    alike = all(list(cell.settings) == names for cell in results)
    axes = list(zip(*(cell.settings.values() for cell in results), strict=True)) if alike else []
    if (
        alike
        and len(axes) <= 2
        and all(isinstance(value, (int, float)) for values in axes for value in values)
    ):
        numbers: dict[tuple[float, ...], list[float]] = {}
        for cell, found in results.items():
            numbers.setdefault(tuple(cell.settings.values()), []).append(found["metrics"][metric])
        if len(axes) == 1:
            return _plot_curve(
                names[0], metric, {key[0]: values for key, values in numbers.items()}, path
            )
        if len(axes) == 2:
            return _plot_heat_map((names[0], names[1]), metric, numbers, path)
    _plot_bars(results, metric, path)


def _plot_curve(name: str, metric: str, numbers: dict[float, list[float]], path: str) -> None:
    from hf_dp._plotting import panels

    figure, (axes,) = panels(1)
    places = sorted(numbers)
    means = [statistics.mean(numbers[place]) for place in places]
    spread = [[mean - min(numbers[p]) for mean, p in zip(means, places, strict=True)],
              [max(numbers[p]) - mean for mean, p in zip(means, places, strict=True)]]  # fmt: skip
    axes.errorbar(places, means, yerr=spread, marker="o", capsize=3)
    if min(places) > 0 and max(places) >= 8 * min(places):
        axes.set_xscale("log", base=2)
    axes.set_xlabel(name)
    axes.set_ylabel(metric)
    figure.savefig(path)


def _plot_heat_map(
    names: tuple[str, str], metric: str, numbers: dict[tuple[float, ...], list[float]], path: str
) -> None:
    from hf_dp._plotting import panels

    rows, columns = (sorted({key[axis] for key in numbers}) for axis in (0, 1))
    means = [
        [
            statistics.mean(numbers[row, column]) if (row, column) in numbers else float("nan")
            for column in columns
        ]
        for row in rows
    ]
    figure, (axes,) = panels(1, width=1.0 * len(columns) + 2.5, height=0.5 * len(rows) + 1.5)
    image = axes.imshow(means, aspect="auto", cmap="viridis")
    for i, row in enumerate(means):
        for j, mean in enumerate(row):
            axes.text(j, i, f"{mean:.3f}", ha="center", va="center", color="white", fontsize=8)
    axes.set_yticks(range(len(rows)), [f"{row:g}" for row in rows])
    axes.set_xticks(range(len(columns)), [f"{column:g}" for column in columns])
    axes.set_ylabel(names[0])
    axes.set_xlabel(names[1])
    figure.colorbar(image, label=metric)
    figure.savefig(path)


def _plot_bars(results: dict[Cell, dict[str, Any]], metric: str, path: str) -> None:
    from hf_dp._plotting import panels

    groups = {
        label: [row["metrics"][metric] for row in rows]
        for label, rows in _by_label(results).items()
    }
    figure, (axes,) = panels(1, width=6.5, height=0.5 * len(groups) + 1.5)
    means = [statistics.mean(values) for values in groups.values()]
    spread = [[m - min(v), max(v) - m] for m, v in zip(means, groups.values(), strict=True)]
    axes.barh(
        range(len(groups)),
        means,
        xerr=list(zip(*spread, strict=True)),
        color="tab:blue",
        height=0.6,
        capsize=3,
    )
    axes.set_yticks(range(len(groups)), [label or "recipe" for label in groups])
    axes.invert_yaxis()
    axes.set_xlabel(metric)
    axes.set_xlim(left=max(0.0, min(min(v) for v in groups.values()) - 0.1))
    figure.savefig(path)
