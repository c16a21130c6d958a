"""Time training end to end, stock and private, on the same rows with the same number of steps.

A run is one call of ``trainer.train()`` on a fresh copy of the model, with everything a user gets
and nothing more: no evaluation, saving or logging. A private run also includes the self-check
before the first step, noise, ledger, epsilon and card. Poisson samples vary in size, so times are
divided by the examples that were really processed. Rounds and the order of modes within them are
those of :mod:`hf_dp.benchmarks.rounds`.
"""

from __future__ import annotations

import copy
import gc
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import DataCollatorWithPadding, PrinterCallback, Trainer, TrainingArguments

from hf_dp import _validate
from hf_dp.benchmarks.environment import environment
from hf_dp.benchmarks.rounds import Round, interleave
from hf_dp.benchmarks.tables import aligned
from hf_dp.benchmarks.training_task import (
    Counter,
    Run,
    Task,
    TrainingWork,
    one_pass,
    unsorted_batches,
)
from hf_dp.benchmarks.workload import threads_of
from hf_dp.errors import HfDpError
from hf_dp.trainer.arguments import DPTrainingArguments
from hf_dp.trainer.trainer import DPTrainer

Log = Callable[[str], None]

# mode -> description
MODES = {
    "stock": "transformers.Trainer, random order",
    "stock_by_length": "transformers.Trainer, group_by_length",
    "ours_unsorted": "DPTrainer, physical batches in sampling order",
    "ours": "DPTrainer",
    "ours_by_tokens": "DPTrainer, physical batches sized by tokens alone",
}
DEFAULT_MODES = ("stock", "stock_by_length", "ours_unsorted", "ours")
# (mode, baseline) -> what the ratio of their throughputs shows
RATIOS = {
    ("ours", "ours_unsorted"): "what sorting by length gives",
    ("ours", "stock"): "beside stock order",
    ("ours", "stock_by_length"): "beside stock length grouping",
    ("ours_unsorted", "stock"): "privacy alone, equally padded",
    ("ours_by_tokens", "ours"): "what sizing by tokens gives",
}
LEGEND = (
    "s/1000: seconds for 1,000 examples; CPU: seconds of all threads. before: seconds before the "
    "first sample,\nand share of the run; after: seconds after the last step. data: share of the "
    "run in which sampled rows\nwere fetched, collated and padded (private modes). padding: share "
    "of all positions."
)


def train_once(work: TrainingWork, task: Task, mode: str, seed: int = 0) -> Run:
    """Train a copy of the task's model in one mode and time it; remove the output folder.

    Raises: HfDpError when the number of steps, or of examples in a stock mode, is not what was
        asked for.
    """
    with tempfile.TemporaryDirectory() as folder:
        counter = Counter()
        trainer = _build_trainer(work, task, mode, counter, str(Path(folder) / "run"), seed)
        trainer.remove_callback(PrinterCallback)
        gc.collect()  # what another run left is not collected in this one's time
        start, cpu_start = time.perf_counter(), time.process_time()
        with (
            counter.timing_data(),
            unsorted_batches() if mode == "ours_unsorted" else nullcontext(),
        ):
            trainer.train()
        if work.machine.on_cuda:
            torch.cuda.synchronize()
        end, cpu_end = time.perf_counter(), time.process_time()
    run = Run(
        end - start,
        cpu_end - cpu_start,
        counter.begun - start,
        end - counter.stepped,
        int(trainer.state.global_step),
        counter.examples,
        counter.tokens,
        counter.positions,
        counter.data,
    )
    asked = work.optimizer_steps * work.logical_batch_size
    if run.steps != work.optimizer_steps or (mode.startswith("stock") and run.examples != asked):
        raise HfDpError(
            f"The mode {mode} made {run.steps} optimizer steps with {run.examples} examples; "
            f"{work.optimizer_steps} steps with {asked} were asked for, so its time cannot be "
            "compared."
        )
    return run


def _build_trainer(
    work: TrainingWork, task: Task, mode: str, counter: Counter, folder: str, seed: int
) -> Trainer:
    common: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": work.optimizer_steps,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "eval_strategy": "no",
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": not work.machine.on_cuda,
        "dataloader_pin_memory": work.machine.on_cuda,
        "per_device_train_batch_size": work.physical_batch_size,
        "seed": seed,
    }
    given: dict[str, Any] = {
        "model": copy.deepcopy(task.model),
        "data_collator": DataCollatorWithPadding(task.tokenizer),
        "callbacks": [counter],
    }
    if mode.startswith("stock"):
        common["gradient_accumulation_steps"] = work.logical_batch_size // work.physical_batch_size
        common["train_sampling_strategy"] = (
            "group_by_length" if mode == "stock_by_length" else "random"
        )
        rows = one_pass(task.rows, work.optimizer_steps * work.logical_batch_size)
        return Trainer(args=TrainingArguments(**common), train_dataset=rows, **given)
    if mode == "ours_by_tokens":
        # At most the memory of nine in ten batches of the other modes. There is no limit by count,
        # so short examples come in large batches.
        common["per_device_train_batch_size"] = work.logical_batch_size
        longest = sorted(task.lengths)[math.ceil(0.9 * len(task.rows)) - 1]
        common["max_tokens_per_physical_batch"] = work.physical_batch_size * longest
    private = DPTrainingArguments(
        noise_multiplier=1.0, expected_batch_size=work.logical_batch_size, **common
    )
    return DPTrainer(args=private, train_dataset=task.rows, **given)


def measure_training(
    work: TrainingWork,
    task: Task,
    modes: Sequence[str] = DEFAULT_MODES,
    log: Log = lambda line: None,
) -> dict[str, Any]:
    """Time every mode, after a warm-up of each.

    Args:
        modes: keys of MODES.
        log: called with progress.

    Returns: what ``--json`` writes: environment, workload, one row a mode, ratios, and all raw
        runs.
    Raises: InvalidArgumentError; HfDpError as :func:`train_once`.
    """
    names = check_modes(modes)
    if len(task.rows) != work.rows:
        raise _validate.invalid(
            "rows", work.rows, f"to be the number of rows of the task, {len(task.rows)}"
        )
    runs: dict[str, list[Run]] = {name: [] for name in names}

    def timed(name: str) -> float:
        run = train_once(work, task, name, seed=len(runs[name]))
        log(f"{name}: {run.seconds:.1f} s, {run.examples} examples")
        runs[name].append(run)
        return run.seconds_per_example

    with threads_of(work.machine):
        machine = environment(work.machine)
        for name in names:
            log(f"warming up {name}")
            train_once(work.warm_up(), task, name)
        rounds = interleave({name: partial(timed, name) for name in names}, work.rounds, log)
    return {
        "benchmark": "training",
        "environment": machine,
        "workload": _described(work, task),
        "modes": {name: _row(runs[name]) for name in names},
        "ratios": {
            f"{a}/{b}": compare(rounds, a, b) for a, b in RATIOS if a in names and b in names
        },
        "runs": {name: [asdict(run) for run in runs[name]] for name in names},
    }


def _described(work: TrainingWork, task: Task) -> dict[str, Any]:
    return {
        **asdict(work),
        **task.names,
        "steps": work.optimizer_steps,
        "device": work.machine.device,
        "threads": work.machine.threads,
        "precision": "fp32",
        "dropout": task.dropout,
    }


def check_modes(modes: Sequence[str]) -> list[str]:
    """Return the modes without repetitions. Raises: InvalidArgumentError for an unknown one."""
    return list(dict.fromkeys(_validate.one_of("modes", name, MODES) for name in modes))


def compare(rounds: Sequence[Round], mode: str, baseline: str) -> dict[str, float]:
    """Return the throughput of ``mode`` over that of ``baseline``: median, lowest and highest.

    Args:
        rounds: seconds per example by mode; both are compared within each round.
    """
    values = [each[baseline] / each[mode] for each in rounds]
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def _row(runs: Sequence[Run]) -> dict[str, Any]:
    seconds = statistics.median(run.seconds_per_example for run in runs)
    return {
        "seconds_per_1000_examples": 1000 * seconds,
        "cpu_seconds_per_1000_examples": statistics.median(
            1000 * run.cpu_seconds / run.examples for run in runs
        ),
        "examples_per_second": 1 / seconds,
        "preparation_seconds": statistics.median(run.preparation for run in runs),
        "finishing_seconds": statistics.median(run.finishing for run in runs),
        "preparation_share": statistics.median(run.preparation / run.seconds for run in runs),
        "examples": statistics.median(run.examples for run in runs),
        "data_share": statistics.median(run.data / run.seconds for run in runs),
        "padding_share": 1 - sum(run.tokens for run in runs) / sum(run.positions for run in runs),
    }


def training_table(report: dict[str, Any]) -> str:
    """Return times by mode and the ratios between modes, as aligned text."""
    parts = [_heading(report), f"{_times(report['modes'])}\n{LEGEND}"]
    if report["ratios"]:
        parts.append(f"throughput within a round\n{_ratios(report['ratios'])}")
    return "\n\n".join(parts)


def _heading(report: dict[str, Any]) -> str:
    w, e = report["workload"], report["environment"]
    load = "" if e["load_average"] is None else f", load before {e['load_average']:.1f}"
    return (
        f"{w['model']}, {w['rows']} rows of {w['train_file']}, at most {w['max_length']} tokens, "
        f"{w['precision']}, dropout {w['dropout']:g}\n{w['steps']} optimizer steps of "
        f"{w['logical_batch_size']} examples in physical batches of {w['physical_batch_size']}; "
        f"wall time of train(), median of {w['rounds']} interleaved rounds\n{e['device']}, "
        f"{e['threads']} threads, torch {e['torch']}, transformers {e['transformers']}{load}"
    )


def _times(rows: dict[str, dict[str, Any]]) -> str:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "s/1000": lambda row: f"{row['seconds_per_1000_examples']:.2f}",
        "CPU s/1000": lambda row: f"{row['cpu_seconds_per_1000_examples']:.2f}",
        "examples/s": lambda row: f"{row['examples_per_second']:.1f}",
        "examples": lambda row: f"{row['examples']:g}",
        "before, s": lambda row: f"{row['preparation_seconds']:.2f}",
        "share": lambda row: f"{row['preparation_share']:.1%}",
        "after, s": lambda row: f"{row['finishing_seconds']:.2f}",
        "data": lambda row: f"{row['data_share']:.1%}" if row["data_share"] else "-",
        "padding": lambda row: f"{row['padding_share']:.1%}",
    }
    cells = [
        [name, *(cell(row) for cell in columns.values()), MODES[name]] for name, row in rows.items()
    ]
    return aligned(["mode", *columns, ""], cells)


def _ratios(ratios: dict[str, dict[str, float]]) -> str:
    cells = [
        [pair, f"{each['median']:.3f}", f"{each['lowest']:.3f}..{each['highest']:.3f}", what]
        for pair, what in {f"{a}/{b}": what for (a, b), what in RATIOS.items()}.items()
        if (each := ratios.get(pair))
    ]
    return aligned(["ratio", "median", "lowest..highest", ""], cells)
