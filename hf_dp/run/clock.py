"""Measure how long the parts of a run take. Times reveal the sizes of draws, so they are written
only to a file that the sweep that starts a run may name in the environment."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "HF_DP_TIMES"  # names the file
TRAINING, SELECTION = "training", "selection"


class Clock:
    """Adds up wall time and this process's processor time, in seconds, of the parts of a run."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what happens inside to a part; parts may contain others."""
        wall, processor = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            known = self.seconds.setdefault(name, {"wall": 0.0, "processor": 0.0})
            known["wall"] += time.perf_counter() - wall
            known["processor"] += time.process_time() - processor

    def write(self) -> None:
        """Write the times to the file that the environment names, if it names one."""
        if path := os.environ.get(VARIABLE):
            Path(path).write_text(json.dumps(self.seconds) + "\n", encoding="utf-8")
