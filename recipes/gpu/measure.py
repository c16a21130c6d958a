"""Time forward and backward of private steps on this GPU, beside steps without privacy and Opacus.

    PYTHONPATH=. python recipes/gpu/measure.py OUTPUT.json [--seconds 300] [--cases 0,3]

Weights are random, so nothing is downloaded. The noise multiplier, which no time depends on, is not
needed: noise and update cost the same in all modes and are left out. A case that does not fit into
the time or the memory says so, and what is measured by then is written.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_dp.benchmarks.modes import Refused, build_mode, interleave, seconds_of_step, spread
from hf_dp.benchmarks.workload import Workload, build_model, environment, make_batch

# Model, examples of a physical batch, tokens, and whether autocast computes in bfloat16.
CASES: list[tuple[str, int, int, bool]] = [
    ("roberta-base", 64, 128, True),
    ("roberta-large", 32, 128, True),
    ("gpt2", 32, 128, True),
    ("gpt2", 16, 512, True),
    ("llama-1b", 8, 512, True),
    ("qwen-7b-lora", 8, 512, True),
    ("qwen-7b-lora", 1, 4096, True),
    ("gpt2-lora", 32, 128, True),
    ("llama-1b", 1, 4096, True),
    ("roberta-base", 64, 128, False),
]
SMALL = [("tiny", 4, 12, True), ("tiny-bert", 4, 12, False)]
OURS = ("non_private", "book_keeping", "two_pass")
GIB = 2**30


def ready(mode: Any, workload: Workload) -> tuple[Any, float | None]:
    """Return what makes a step and returns its seconds, and the peak of the GPU's memory in GiB."""
    batch = make_batch(workload, mode.model)
    step = partial(seconds_of_step, mode, batch)
    step()
    step()
    if workload.device != "cuda":
        return step, None
    torch.cuda.reset_peak_memory_stats()
    step()
    return step, torch.cuda.max_memory_allocated() / GIB


def measured(workload: Workload, rounds: int) -> dict[str, Any]:
    """Return examples a second, the ratio to steps without privacy, and memory of each mode.

    Ours share a model and take turns. Opacus changes its model, so it comes after them, alone.
    """
    rows: dict[str, dict[str, Any]] = {}
    timers = {}
    shared = build_model(workload)
    for name in OURS:
        try:
            timers[name], peak = ready(build_mode(name, workload, shared), workload)
            rows[name] = {"peak_gib": peak}
        except (Refused, torch.cuda.OutOfMemoryError) as error:
            shared.zero_grad(set_to_none=True)
            rows[name] = {"refused": str(error)[:300]}
    if timers:
        first = next(iter(timers.values()))()
        found = interleave(timers, rounds, repeats=max(2, min(20, round(0.5 / first))))
        for name in timers:
            seconds = statistics.median(each[name] for each in found)
            rows[name]["examples_per_second"] = workload.per_device_train_batch_size / seconds
            if "non_private" in timers:
                rows[name]["ratio"], rows[name]["spread"] = spread(found, name, "non_private")
    timers.clear()
    del shared
    clear()
    try:
        step, peak = ready(build_mode("opacus_ghost", workload), workload)
        seconds = statistics.median(step() for _ in range(3 * rounds))
        speed = workload.per_device_train_batch_size / seconds
        rows["opacus_ghost"] = {"peak_gib": peak, "examples_per_second": speed}
        if "examples_per_second" in rows["non_private"]:
            rows["opacus_ghost"]["ratio"] = speed / rows["non_private"]["examples_per_second"]
    except Exception as error:  # Opacus refuses by errors of any class
        rows["opacus_ghost"] = {"refused": f"{type(error).__name__}: {error}"[:300]}
    return rows


def clear() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--cases", help="their numbers, with commas; `small` for tests")
    parser.add_argument("--rounds", type=int, default=5, help="at least 3")
    asked = parser.parse_args(argv)
    gc.freeze()  # what was imported is not searched before each step
    cases = SMALL if asked.cases == "small" else CASES
    if asked.cases and asked.cases != "small":
        cases = [CASES[int(number)] for number in asked.cases.split(",")]
    end = time.monotonic() + asked.seconds
    report: list[dict[str, Any]] = []
    for model, size, length, bf16 in cases:
        case = f"{model}, {size} x {length}, {'bfloat16' if bf16 else 'float32'}"
        if time.monotonic() > end:
            print(f"{case}: no time left")
            continue
        try:
            workload = Workload(model, size, length, bf16=bf16)
            made = {"modes": measured(workload, asked.rounds)} | environment(workload)
        except Exception as error:  # the other cases are measured nevertheless
            made = {"refused": f"{type(error).__name__}: {error}"[:500]}
        clear()
        report.append({"case": case} | made)
        Path(asked.output).write_text(json.dumps(report, indent=1))
        print(case, *map(line, made.get("modes", {"": made}).items()), sep="\n", flush=True)
    return 0


FORMATS = {
    "refused": "{}",
    "examples_per_second": "{:9.1f} examples a second",
    "ratio": "{:.3f} of non_private",
    "spread": "spread {:.3f}",
    "peak_gib": "{:.1f} GiB at most",
}


def line(mode: tuple[str, dict[str, Any]]) -> str:
    """Return a line of the table: examples a second, their ratio, and the peak of the memory."""
    name, row = mode
    known = [words.format(row[key]) for key, words in FORMATS.items() if row.get(key) is not None]
    return f"  {name:14}{', '.join(known)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
