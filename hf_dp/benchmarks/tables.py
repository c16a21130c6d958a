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
    parts += [_forms(mode, rows) for mode, rows in report.get("forms", {}).items()]
    if "max_batch" in report:
        parts.append(_capacity(report["max_batch"]))
    return "\n\n".join(parts)


def processes_table(report: Mapping[str, Any]) -> str:
    """Return speed on several processes, and its ratio to the stock step of the same way."""
    how, protocol = report["processes"], report["protocol"]
    repeats = ", ".join(f"{each} steps ({way})" for way, each in protocol["repeats"].items())
    after = report["environment"]["load_average_after"]
    heading = (
        f"{title(report)}{'' if after is None else f', after {after:.1f}'}\n"
        f"{how['count']} processes, each {how['physical_batches']} physical batches a step; whole "
        f"steps, AdamW; median of {protocol['rounds']} interleaved rounds of {repeats}"
    )
    cells = []
    for way, stock in report["ways"].items():
        row, name = report["modes"][way], f"private_{way}"
        speed = f"{row['examples_per_second']:.2f}"
        cells.append([way, speed, *"---", f"{row['cpu_seconds']:.2f}", "-", stock])
        row = report["modes"][name]
        computed = [f"{row['cpu_seconds']:.2f}", f"{row['cpu_ratio']:.3f}"]
        note = "ours: engine, ledger, sum, noise; ratios to the line above"
        cells.append([name, *_measured(row), *computed, note])
    return f"{heading}\n\n" + aligned(
        ["step", "examples/s", "ratio", "IQR", "verdict", "CPU s", "ratio", "note"], cells
    )


def _measured(row: Mapping[str, Any]) -> list[str]:
    """Return speed, ratio, the largest spread of a run, and verdict."""
    spread = max(each["interquartile_range"] for each in row["ratios"])
    speed = f"{row['examples_per_second']:.2f}"
    return [speed, f"{row['ratio']:.3f}", f"{spread:.3f}", row["verdict"]]


def _throughput_row(mode: str, row: Mapping[str, Any]) -> list[str]:
    if "refused" in row:
        return [mode, *["-"] * 6, f"refused: {row['refused']}"]
    medians = [f"{each['median']:.3f}" for each in row["ratios"]]
    bounds = [f"{row[name]:.3f}" if row[name] else "-" for name in ("bound", "bound_symmetric")]
    note = "; ".join(
        filter(None, [f"runs {' '.join(medians)}" if len(medians) > 1 else "", row["note"]])
    )
    measured = _measured(row)
    if mode == "non_private":
        return [mode, *measured[:2], "-", "-", "-", "-", row["note"]]
    return [mode, *measured, *bounds, note]


def _operators(mode: str, rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [
        [row["operator"], f"{1e3 * row['seconds_more']:+.1f}", f"{1e3 * row['seconds']:.1f}", ""]
        for row in rows
    ]
    return f"what is left in {mode}, milliseconds of one step\n" + aligned(
        ["operator", "more", "in all", ""], cells
    )


def _forms(mode: str, rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [
        [" x ".join(map(str, row["shape"])), row["form"], str(row["parameters"])]
        for row in rows
        if len(row["shape"]) > 1
    ]
    return f"forms of per-example gradients in {mode}, of weights\n" + aligned(
        ["shape", "form", "weights"], cells
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


def scale_table(report: Mapping[str, Any]) -> str:
    """Return bytes, memory and predicted efficiency by the number of processes."""
    machine = report["machine"]
    heading = (
        f"{report['model']}, {report['sizes']['trained']:,} trained numbers of 4 bytes, AdamW; "
        f"{report['examples']:g} expected examples of each process in a step, physical batches of "
        f"{report['batch_size']}\npredicted, not measured: "
        + ", ".join(f"{name} {value:g}" for name, value in machine.items())
    )
    draws = [
        [str(each["processes"]), f"{each['largest']:.3f}", f"{each['batches']:.2f}", ""]
        for each in report["draws"]
    ]
    parts = [
        heading,
        "largest draw of a process over the mean, and its physical batches, expected\n"
        + aligned(["processes", "largest", "batches", ""], draws),
    ]
    header = ["processes", "sent stock", "ours", "held stock", "ours"]
    header += ["efficiency stock", "ours", "ours/stock", ""]
    for way, rows in report["ways"].items():
        cells = [_scale_row(row, rows[0]) for row in rows]
        parts.append(
            f"{way}: MiB of each process a step; efficiency of a process beside one\n"
            + aligned(header, cells)
        )
    return "\n\n".join(parts)


def _scale_row(row: Mapping[str, Any], one: Mapping[str, Any]) -> list[str]:
    sizes = ("stock_sent", "private_sent", "stock_held", "private_held")
    return [
        str(row["processes"]),
        *(f"{row[name] / 2**20:,.0f}" for name in sizes),
        *(f"{one[name] / row[name]:.3f}" for name in ("stock_seconds", "private_seconds")),
        f"{row['stock_seconds'] / row['private_seconds']:.3f}",
        "",
    ]
