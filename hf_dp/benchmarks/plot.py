"""Plot bars of memory and speed by mode, side by side, as Figure 5 of Li et al. (ICLR 2022)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_dp import _plotting

Panel = tuple[str, dict[str, float]]


def panels(reports: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Return (axis label, {mode: value}) of every figure in the reports, memory first.

    Refused modes have no bar.
    """
    found = [panel for report in reports for panel in _panels_of(report)]
    return sorted(found, key=lambda panel: "examples per second" in panel[0])


def _panels_of(report: Mapping[str, Any]) -> Iterator[Panel]:
    def values(rows: Mapping[str, Mapping[str, Any]], key: str) -> dict[str, float]:
        return {mode: row[key] for mode, row in rows.items() if key in row}

    if report["benchmark"] == "memory":
        yield "peak memory, MiB", values(report["modes"], "mebibytes")
        return
    size = f"batch {report['workload']['batch_size']}"
    yield f"examples per second, {size}", values(report["modes"], "examples_per_second")
    if "max_batch" in report:
        yield "maximum batch size", values(report["max_batch"], "max_batch")
        yield (
            "examples per second, maximum batch",
            values(report["max_batch"], "examples_per_second"),
        )


def plot_reports(reports: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Write one figure with a panel of bars for each measurement.

    The ending of the file name selects the format.
    """
    shown = panels(reports)
    figure, places = _plotting.panels(len(shown))
    for axes, (label, bars) in zip(places, shown, strict=True):
        patches = axes.bar(
            list(bars), list(bars.values()), color=[f"C{number}" for number in range(len(bars))]
        )
        axes.bar_label(patches, fmt="{:.4g}", fontsize=8)
        axes.set_ylabel(label)
        axes.tick_params(axis="x", labelrotation=30)
    w = reports[0]["workload"]
    figure.suptitle(
        f"{w['model']}, {w['length']} positions, {w['precision']}, "
        f"{reports[0]['environment']['device']}"
    )
    figure.savefig(path, dpi=150)
