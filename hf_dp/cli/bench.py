"""``hf-dp bench``: measure private training beside non-private training on equal work."""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_dp import _validate
from hf_dp.benchmarks.workload import SHAPES, Workload
from hf_dp.cli.options import Parser, add_fields, aligned, taken

if TYPE_CHECKING:
    from hf_dp.benchmarks.modes import Report

NOTE = (
    "Models have random weights and are built offline. A step is forward and backward on one "
    "physical batch, dropout on; noise and optimizer, equal for all modes, are left out. Models: "
    f"{', '.join(SHAPES)}."
)
MODES = (
    "comma-separated: non_private, the engine's clipping strategies (book_keeping, two_pass, "
    "per_example), dp_fp (noise on the representation), opacus_hooks, opacus_ghost "
    "(default: non_private,book_keeping)"
)
COMMANDS = {
    "throughput": (
        "Examples per second, and the ratio to non-private training.",
        "RoBERTa-base on two cores, about 5 minutes",
        "roberta-base --per_device_train_batch_size 16 --threads 2",
    ),
    "memory": (
        "Peak memory, each mode in a process of its own.",
        "beside Opacus",
        "gpt2 --max_length 100 --modes non_private,book_keeping,opacus_hooks",
    ),
}


def build_parser() -> Parser:
    """Return the parser of both commands."""
    parser = Parser("hf-dp bench", description=NOTE)
    names = ",".join(COMMANDS)
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar=f"{{{names}}}")
    measured = [field.name for field in dataclasses.fields(Workload) if "help" in field.metadata]
    for name, (text, what, words) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=text,
            description=textwrap.fill(f"{text} {NOTE}", 100, break_on_hyphens=False),
            epilog=f"example ({what}):\n  hf-dp bench {name} --model {words}\n",
        )
        command.option("--model", "a model listed above", required=True)
        command.option("--modes", MODES, "A,B")
        add_fields(command, Workload, measured)
        if name == "throughput":
            turns = "steps of every mode in a round (default: what takes 8 seconds)"
            command.option("--rounds", "interleaved timings (default: 7)", "N", type=int, default=7)
            command.option("--repeats", turns, "N", type=int)
        else:
            command.option("--steps", "steps of a process (default: 3)", "N", type=int, default=3)
        command.switch("--json", "one JSON object on stdout, with all raw numbers")
    return parser


def main(argv: Sequence[str]) -> int:
    """Measure, and print a table or JSON."""
    args = build_parser().parse_args(list(argv))
    _validate.one_of("model", args.model, SHAPES)  # before the heavy imports
    workload, modes = taken(Workload, args), chosen_modes(args.modes)
    if args.benchmark == "throughput":
        from hf_dp.benchmarks.modes import measure_throughput

        report = measure_throughput(workload, modes, args.rounds, args.repeats, _progress)
    else:
        from hf_dp.benchmarks.memory import measure_memory

        report = measure_memory(workload, modes, args.steps, _progress)
    print(json.dumps(report, allow_nan=False) if args.json else table(report))
    return 0


def table(report: Report) -> str:
    """Return what was measured and where, and a row a mode."""
    w, e, memory = report["workload"], report["environment"], report["benchmark"] == "memory"
    checkpointing = ", gradient checkpointing" if w["gradient_checkpointing"] else ""
    what = (
        f"{w['model']}, batch {w['per_device_train_batch_size']} x {w['max_length']} tokens, "
        f"{'bf16' if w['bf16'] else 'fp32'}, dropout {w['dropout']:g}{checkpointing}"
    )
    where = [e["device"], f"{w['threads']} threads"]
    where += [f"{name} {e[name]}" for name in ("torch", "transformers", "opacus") if name in e]
    if memory:
        how = f"{report['modes']['non_private']['measured']}; a process of its own for each mode"
        header = ["mode", "MiB", "ratio", "note"]
    else:
        how = (
            "forward + backward; median of {rounds} interleaved rounds of {repeats} steps; ratio = "
            "non-private time / time in the same round;\nits spread over the rounds (interquartile "
            "range) must be under 0.04, else repeat"
        ).format(**report["protocol"])
        header = ["mode", "examples/s", "ratio", "spread", "verdict", "note"]
    rows = []
    for mode, row in report["modes"].items():
        if "refused" in row:
            cells = ["-"] * (len(header) - 2) + [f"refused: {row['refused']}"]
        elif memory:
            cells = [f"{row['mebibytes']:.1f}", f"{row['ratio']:.3f}", row["note"]]
        else:
            cells = [f"{row['examples_per_second']:.2f}", f"{row['ratio']:.3f}"]
            cells += [f"{row['interquartile_range']:.3f}", row["verdict"], row["note"]]
        rows.append([mode, *cells])
    return f"{what}\n{', '.join(where)}\n{how}\n\n{aligned(header, rows)}"


def chosen_modes(words: str | None) -> list[str]:
    """Return the modes that ``--modes`` names."""
    return [word.strip() for word in (words or "non_private,book_keeping").split(",")]


def _progress(line: str) -> None:
    print(f"hf-dp bench: {line}", file=sys.stderr, flush=True)
