"""The runs of a sweep: their settings, and where they write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMES = "times.json"  # in the folder of a cell, beside its attempts
METRICS = "eval_results.json"  # Trainer.save_metrics' name; the last thing that a run writes
RECIPE = "recipe"  # the setting of a cell that names its recipe, in a sweep over several


@dataclass(frozen=True, eq=False)
class Cell:
    """One run: what it sets beside the recipe, and where it writes."""

    settings: dict[str, Any]
    seed: int
    folder: Path

    @property
    def attempts(self) -> list[Path]:
        """Return the output folders of all attempts.

        Interrupted ones are among them, since what they have spent counts.
        """
        return sorted(self.folder.glob("run*"), key=lambda path: int(path.name.removeprefix("run")))

    @property
    def done(self) -> Path | None:
        """Return the output folder of the attempt that was completed."""
        return next((path for path in self.attempts if (path / METRICS).exists()), None)

    @property
    def label(self) -> str:
        """Return the settings in words."""
        return " ".join(f"{key}={in_words(value)}" for key, value in self.settings.items())


def in_words(value: Any) -> str:
    """Return a value in words; an infilling block as its label words and its template."""
    if isinstance(value, dict) and isinstance(value.get("label_words"), dict):
        return f"{'/'.join(map(str, value['label_words'].values()))} in {value.get('template')!r}"
    return str(value)
