"""Thousands of private steps do not fill the memory."""

import gc
import mmap
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny
from statements import comparison_by
from transformers import TrainerCallback

STEPS, EVERY, WARM = 2000, 50, 500
BOUND = 2.0  # MiB per 1,000 steps; the model and its gradients have 0.1


def resident() -> float:
    """Return the memory of this process that is in use, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


class Watch(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % EVERY == 0 and state.global_step >= WARM:
            gc.collect()
            self.seen.append((state.global_step, resident()))


class Leak(TrainerCallback):
    """Keeps 50 kB a step, of fresh pages, whatever was freed before: a planted bug."""

    def __init__(self) -> None:
        self.kept: list[mmap.mmap] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.kept.append(mmap.mmap(-1, 50_000))
        self.kept[-1].write(b"x" * 50_000)


@pytest.fixture(autouse=True)
def by_rdp_alone(monkeypatch):
    """Leave out the accountants by PLD and PRV: each save fills a place of bounded caches of theirs
    (FFT plans in SciPy, distributions), which are large where epsilon is, and are no part of a
    step."""
    monkeypatch.setattr("hf_dp.statement.wording.compare", comparison_by("rdp"))


def slope(folder: Path, *callbacks: TrainerCallback) -> float:
    """Return by how many MiB the memory grows in 1,000 steps."""
    watch = Watch()
    options = {"max_steps": STEPS, "accountant": "rdp", "logging_strategy": "no"}
    saving = {"save_strategy": "steps", "save_steps": 500, "save_total_limit": 1}
    given = {"callbacks": [watch, *callbacks]}
    trainer = tiny.trainer(folder, given=given, **options, **saving)
    trainer.train()
    steps, mebibytes = zip(*watch.seen, strict=True)
    found = float(np.polyfit(steps, mebibytes, 1)[0]) * 1000
    sys.stdout.write(f"{found:.3f} MiB per 1,000 steps\n")
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_two_thousand_steps_take_no_more_memory_than_five_hundred(tmp_path):
    assert slope(tmp_path) < BOUND


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_a_planted_leak_is_seen(tmp_path):
    assert slope(tmp_path, Leak()) > BOUND
