"""Format a report as aligned plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


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


def title(report: Mapping[str, Any]) -> str:
    """Return one line on what was measured and one on where."""
    w, e = report["workload"], report["environment"]
    checkpointing = ", gradient checkpointing" if w["gradient_checkpointing"] else ""
    what = (
        f"{w['model']}, batch {w['batch_size']} x {w['length']} positions, {w['precision']}, "
        f"dropout {w['dropout']:g}{checkpointing}"
    )
    load = "" if e["load_average"] is None else f", load before {e['load_average']:.1f}"
    opacus = f", opacus {e['opacus']}" if e["opacus"] else ""
    where = (
        f"{e['device']}, {e['threads']} threads, torch {e['torch']}, transformers "
        f"{e['transformers']}{opacus}{load}"
    )
    return f"{what}\n{where}"


def throughput_table(report: Mapping[str, Any]) -> str:
    """Return speed, ratio to non-private with its spread, and the bounds.

    Operators and largest batches follow where they were measured.
    """
    protocol = report["protocol"]
    how = (
        f"forward + backward; median of {protocol['rounds']} interleaved rounds of "
        f"{protocol['repeats']} steps; ratio = non-private time / time in the same round"
    )
    header = ["mode", "examples/s", "ratio", "IQR", "verdict", "bound", "symmetric", "note"]
    parts = [
        f"{title(report)}\n{how}",
        aligned(header, [_throughput_row(*item) for item in report["modes"].items()]),
    ]
    if any(row.get("bound") for row in report["modes"].values()):
        parts.append(
            "bound: flops of non-private / (those + flops of exact norms); symmetric: with half of "
            "each Gram matrix.\ntwo_pass also runs the input gradients of its second backward. "
            "IQR must be under 0.04, else repeat."
        )
    parts += [_operators(mode, rows) for mode, rows in report.get("operators", {}).items()]
    if "max_batch" in report:
        parts.append(_capacity(report["max_batch"]))
    return "\n\n".join(parts)


def _throughput_row(mode: str, row: Mapping[str, Any]) -> list[str]:
    if "refused" in row:
        return [mode, *["-"] * 6, f"refused: {row['refused']}"]
    spread = max(each["interquartile_range"] for each in row["ratios"])
    medians = [f"{each['median']:.3f}" for each in row["ratios"]]
    bounds = [f"{row[name]:.3f}" if row[name] else "-" for name in ("bound", "bound_symmetric")]
    note = "; ".join(
        filter(None, [f"runs {' '.join(medians)}" if len(medians) > 1 else "", row["note"]])
    )
    speed = [f"{row['examples_per_second']:.2f}", f"{row['ratio']:.3f}"]
    if mode == "non_private":
        return [mode, *speed, "-", "-", "-", "-", row["note"]]
    return [mode, *speed, f"{spread:.3f}", row["verdict"], *bounds, note]


def _operators(mode: str, rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [
        [row["operator"], f"{1e3 * row['seconds_more']:+.1f}", f"{1e3 * row['seconds']:.1f}", ""]
        for row in rows
    ]
    return f"what is left in {mode}, milliseconds of one step\n" + aligned(
        ["operator", "more", "in all", ""], cells
    )


def _capacity(rows: Mapping[str, Mapping[str, Any]]) -> str:
    header = ["mode", "max batch", "logical", "examples/s", "ratio", "IQR", "note"]
    cells = []
    for mode, row in rows.items():
        size = str(row.get("max_batch", "-"))
        if "refused" in row:
            cells.append([mode, size, *["-"] * 4, f"refused: {row['refused']}"])
            continue
        numbers = [
            f"{row['examples_per_second']:.2f}",
            f"{row['ratio']:.3f}",
            f"{row['interquartile_range']:.3f}",
        ]
        notes = [] if row["counts"] else ["repeat"]
        if row["logical_batch"] != row["non_private_logical_batch"]:
            notes.append(
                f"common multiple too large: non-private did {row['non_private_logical_batch']}"
            )
        cells.append([mode, size, str(row["logical_batch"]), *numbers, "; ".join(notes)])
    return "each at its largest batch, on the least common multiple with non-private's\n" + aligned(
        header, cells
    )


def memory_table(report: Mapping[str, Any]) -> str:
    """Return peak memory and its ratio to non-private training with the same checkpointing."""
    how = (
        f"{report['measured']}; a process of its own for each mode, median of "
        f"{report['protocol']['repeats']}"
    )
    cells = [
        [mode, "-", "-", f"refused: {row['refused']}"]
        if "refused" in row
        else [mode, f"{row['mebibytes']:.1f}", f"{row['ratio']:.3f}", row["note"]]
        for mode, row in report["modes"].items()
    ]
    return f"{title(report)}\n{how}\n\n" + aligned(["mode", "MiB", "ratio", "note"], cells)
