"""Figures of a sweep over something that is no setting: the size of the model, another metric, the
base before training, or the steps of the runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from typing import Any

from hf_dp._plotting import legend_beside, line_over_seeds, panels, spread
from hf_dp.cli.cells import Cell, in_words
from hf_dp.cli.points import draw_points, read_points
from hf_dp.cli.summary import SIGNALS
from hf_dp.errors import ConfigError

MODEL, PARAMETERS = "model_name_or_path", "parameters"
LOG = "trainer_state.json"  # Trainer.save_state's name

Results = Mapping[Cell, dict[str, Any]]


def metric_of(results: Results, asked: str | None) -> str:
    """Return the metric to plot: the one asked for, else the first score by its name.

    Raises: ConfigError for a metric that a run lacks.
    """
    names = set.intersection(*(set(found["metrics"]) for found in results.values()))
    known = sorted(names, key=lambda name: (name in SIGNALS, name))
    if asked is None:
        return known[0]
    if asked not in known:
        raise ConfigError(f"Expected `--plot-metric` to be one of {known}, got {asked!r}.")
    return asked


def plot_against(
    results: Results, metric: str, against: str, path: str, beside: str | None = None
) -> None:
    """Plot a metric over the number of parameters, or over another metric.

    Over parameters there is a line for each family of models and each combination of the other
    settings (Li et al., figures 1 and 6); over a metric a point for each combination (figure 3,
    right). Bars show the spread of the seeds.

    Args:
        beside: a CSV file with points to show beside them (:func:`hf_dp.cli.points.read_points`),
            over the same quantity; parameters are in millions.

    Raises: ConfigError where a run has no such metric, or the sweep is not over models.
    """
    figure, (axes,) = panels(1, width=6.5, height=4.2)
    if against == PARAMETERS:
        labels = _over_parameters(axes, results, metric)
        axes.set_xlabel("non-embedding parameters (millions)")
    else:
        labels = _over_metric(axes, results, metric, against)
        axes.set_xlabel(against)
    if beside is not None:
        draw_points(axes, read_points(beside, against, metric), labels)
    axes.set_ylabel(metric)
    legend_beside(axes)
    figure.savefig(path, dpi=150)


def _over_parameters(axes: Any, results: Results, metric: str) -> list[str]:
    """Draw the lines, and return their labels in order."""
    from hf_dp.cli.model_size import model_size

    if not all(MODEL in cell.settings for cell in results):
        raise ConfigError(
            f"`--plot-against {PARAMETERS}` needs models to compare. Add --grid {MODEL}=A,B."
        )
    sizes = {
        cell.settings[MODEL]: found.get("size") or model_size(cell.settings[MODEL])
        for cell, found in results.items()
    }
    lines: dict[str, dict[float, list[float]]] = {}
    for cell, found in results.items():
        size = sizes[cell.settings[MODEL]]
        others = " ".join(
            f"{key}={in_words(value)}" for key, value in cell.settings.items() if key != MODEL
        )
        points = lines.setdefault(f"{size.family} {others}".rstrip(), {})
        points.setdefault(size.without_embeddings / 1e6, []).append(found["metrics"][metric])
    for label, points in lines.items():
        line_over_seeds(axes, points, label)
    return list(lines)


def _over_metric(axes: Any, results: Results, metric: str, against: str) -> list[str]:
    """Draw the points, and return their labels in order."""
    groups = _by_label(results)
    for label, rows in groups.items():
        lacking = [row for row in rows if against not in row["metrics"]]
        if lacking:
            raise ConfigError(
                f"Expected `--plot-against` to be {PARAMETERS} or a metric of every run, one of "
                f"{sorted(lacking[0]['metrics'])}, got {against!r}."
            )
        x, y = ([row["metrics"][name] for row in rows] for name in (against, metric))
        axes.errorbar(
            [statistics.mean(x)], [statistics.mean(y)], xerr=spread([x]), yerr=spread([y]),
            marker="o", capsize=3, linestyle="none", label=label or "recipe",
        )  # fmt: skip
    return list(groups)


def plot_over_zero_shot(results: dict[Cell, dict[str, Any]], path: str) -> None:
    """Plot trained over untrained accuracy (Li et al., figure 8).

    There is a line for each combination of the settings other than ``infilling``.
    """
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


def plot_log(results: Results, name: str, path: str) -> None:
    """Plot what runs log over their steps: a line for each combination, the mean over its seeds,
    with a band from the smallest to the largest.

    Raises: ConfigError where a run has no log with that name.
    """
    logs: dict[str, list[dict[int, float]]] = {}
    for cell in results:
        logs.setdefault(cell.label, []).append(_logged(cell, name))
    figure, (axes,) = panels(1, width=6.5, height=4.2)
    for label, curves in logs.items():
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        values = [[curve[step] for curve in curves] for step in steps]
        (line,) = axes.plot(
            steps, [statistics.mean(each) for each in values], marker=".", label=label or "recipe"
        )
        if len(curves) > 1:
            low, high = [min(each) for each in values], [max(each) for each in values]
            axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set_xlabel("step")
    axes.set_ylabel(name)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def _logged(cell: Cell, name: str) -> dict[int, float]:
    """Return the values of a log by step. Raises: ConfigError where there are none."""
    folder = cell.done
    assert folder is not None
    try:
        state = json.loads((folder / LOG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ConfigError(
            f"The log of {cell.label or 'the recipe'!r} cannot be read ({problem}). `--plot-log` "
            f"needs {LOG} of the run, which tasks of text write at their end."
        ) from problem
    history: list[dict[str, Any]] = state["log_history"]
    found = {int(log["step"]): float(log[name]) for log in history if name in log}
    if not found:
        known = sorted({key for log in history for key in log if key not in ("step", "epoch")})
        raise ConfigError(
            f"Expected `--plot-log` to name a log of every run, one of {known}, got {name!r}. Logs "
            "of steps need logging_steps: --set logging_steps=1."
        )
    return found


def _by_label(results: Results) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for cell, result in results.items():
        rows.setdefault(cell.label, []).append(result)
    return rows
