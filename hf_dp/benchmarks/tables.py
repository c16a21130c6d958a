"""Format a report as aligned plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_dp.benchmarks.modes import Report, Row


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return columns as wide as their widest cell.

    The first and the last column stand to the left, numbers to the right.
    """
    table = [list(header), *map(list, rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    last = len(header) - 1
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in (0, last) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    )


def table(report: Report) -> str:
    """Return a report of throughput or memory: what was measured and where, and a row a mode."""
    w, e = report["workload"], report["environment"]
    load = "" if e["load_average"] is None else f", load before {e['load_average']:.1f}"
    opacus = f", opacus {e['opacus']}" if "opacus" in e else ""
    return (
        f"{w['model']}, batch {w['per_device_train_batch_size']} x {w['max_length']} tokens, "
        f"{'bf16' if w['bf16'] else 'fp32'}, dropout {w['dropout']:g}"
        f"{', gradient checkpointing' if w['gradient_checkpointing'] else ''}\n"
        f"{e['device']}, {w['threads']} threads, torch {e['torch']}, transformers "
        f"{e['transformers']}{opacus}{load}\n"
    ) + (_memory(report) if report["benchmark"] == "memory" else _throughput(report))


def _throughput(report: Report) -> str:
    protocol = report["protocol"]
    how = (
        f"forward + backward; median of {protocol['rounds']} interleaved rounds of "
        f"{protocol['repeats']} steps; ratio = non-private time / time in the same round; its "
        "spread\nover a run's rounds (interquartile range) must be under 0.04, else repeat\n\n"
    )
    header = ["mode", "examples/s", "ratio", "spread", "verdict", "note"]
    return how + aligned(header, [_speed(*item) for item in report["modes"].items()])


def _speed(mode: str, row: Row) -> list[str]:
    if "refused" in row:
        return [mode, *["-"] * 4, f"refused: {row['refused']}"]
    shown = [mode, f"{row['examples_per_second']:.2f}", f"{row['ratio']:.3f}"]
    if mode == "non_private":
        return [*shown, "-", "-", row["note"]]
    spread = max(each["interquartile_range"] for each in row["ratios"])
    medians = [f"{each['median']:.3f}" for each in row["ratios"]]
    runs = f"runs {' '.join(medians)}" if len(medians) > 1 else ""
    return [*shown, f"{spread:.3f}", row["verdict"], "; ".join(filter(None, [runs, row["note"]]))]


def _memory(report: Report) -> str:
    rows = report["modes"]
    cells = [
        [mode, "-", "-", f"refused: {row['refused']}"]
        if "refused" in row
        else [mode, f"{row['mebibytes']:.1f}", f"{row['ratio']:.3f}", row["note"]]
        for mode, row in rows.items()
    ]
    how = f"{rows['non_private']['measured']}; a process of its own for each mode\n\n"
    return how + aligned(["mode", "MiB", "ratio", "note"], cells)
