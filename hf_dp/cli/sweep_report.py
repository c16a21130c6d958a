"""What came out of a sweep: a table, a figure, and what all its private runs cost together."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_dp.cli.sweep import Cell


def table(results: dict[Cell, dict[str, Any]]) -> str:
    """Each combination's metrics: mean over its seeds, and the smallest and largest."""
    lines = []
    for label, rows in _by_label(results).items():
        cells = []
        for metric in sorted({metric for row in rows for metric in row["metrics"]}):
            values = [row["metrics"][metric] for row in rows if metric in row["metrics"]]
            spread = f" ({min(values):.4f} to {max(values):.4f}, {len(values)} seeds)" if len(values) > 1 else ""
            cells.append(f"{metric} {statistics.mean(values):.4f}{spread}")
        cells += [f"zero-shot {metric} {value:.4f}" for metric, value in sorted(rows[0].get("zero_shot", {}).items())]
        epsilon = rows[0]["epsilon"]
        cells.append("not private" if epsilon is None else f"epsilon {epsilon:.3f} a run")
        lines.append(f"{label or 'recipe'}: {'; '.join(cells)}")
    return "\n".join(lines)


def _by_label(results: dict[Cell, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for cell, result in results.items():
        rows.setdefault(cell.label, []).append(result)
    return rows


def spent_together(cells: Sequence[Cell]) -> str:
    """What all private runs of the sweep, unfinished ones included, cost on the rows they share: their ledgers composed."""
    from hf_dp.accounting import epsilon
    from hf_dp.cards import document

    folders = [path for cell in cells for path in cell.attempts if (path / document.FILE_NAME).exists()]
    records = [document.read(path) for path in folders]
    if not records:
        return ""
    if any(record.insecure_seed for record in records):
        return (
            "some of these runs drew their noise from a fixed seed (insecure_seed): no epsilon holds for all together"
        )
    delta = min(record.plan.delta for record in records)  # what holds at the smallest holds at all
    total = epsilon([event for record in records for event in record.ledger.events], delta, "rdp")
    return (
        f"all {len(records)} private runs together: epsilon {total.rounded_up(3)} at delta {delta:g} (rdp, a bound); that is "
        "what holds for whoever sees more than one of them"
    )


def draw_over_zero_shot(results: dict[Cell, dict[str, Any]], path: str) -> None:
    """Trained over untrained accuracy, a line for each combination of the settings other than ``infilling`` (figure 8)."""
    from hf_dp._plotting import panels

    lines: dict[str, list[tuple[float, float]]] = {}
    for cell, found in results.items():
        metric = sorted(found["metrics"])[0]
        others = " ".join(f"{key}={in_words(value)}" for key, value in cell.settings.items() if key != "infilling")
        if found["zero_shot"]:
            lines.setdefault(others or "infilling", []).append((found["zero_shot"][metric], found["metrics"][metric]))
    figure, (axes,) = panels(1)
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.set_xlabel(f"zero-shot {metric}")
    axes.set_ylabel(f"{metric} after training")
    axes.legend(frameon=False)
    figure.savefig(path)


def draw(results: dict[Cell, dict[str, Any]], path: str) -> None:
    """A bar for each combination, a line from the smallest to the largest of its seeds."""
    from hf_dp._plotting import panels

    metric = sorted(next(iter(results.values()))["metrics"])[0]
    groups = {label: [row["metrics"][metric] for row in rows] for label, rows in _by_label(results).items()}
    figure, (axes,) = panels(1, width=6.5, height=0.5 * len(groups) + 1.5)
    means = [statistics.mean(values) for values in groups.values()]
    spread = [[m - min(v), max(v) - m] for m, v in zip(means, groups.values(), strict=True)]
    axes.barh(range(len(groups)), means, xerr=list(zip(*spread, strict=True)), color="tab:blue", height=0.6, capsize=3)
    axes.set_yticks(range(len(groups)), [label or "recipe" for label in groups])
    axes.invert_yaxis()
    axes.set_xlabel(metric)
    axes.set_xlim(left=max(0.0, min(min(v) for v in groups.values()) - 0.1))
    figure.savefig(path)


def in_words(value: Any) -> str:
    """A value in words; an infilling block as its label words and its template."""
    if isinstance(value, dict) and isinstance(value.get("label_words"), dict):
        return f"{'/'.join(map(str, value['label_words'].values()))} in {value.get('template')!r}"
    return str(value)
