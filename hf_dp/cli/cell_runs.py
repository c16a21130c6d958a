"""The runs of a sweep, each in a process of its own: where they write, and what they found."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hf_dp.cli.config import read_yaml
from hf_dp.cli.non_private import NON_PRIVATE
from hf_dp.errors import ConfigError, DataError
from hf_dp.run.clock import VARIABLE

TIMES = "times.json"  # in the folder of a cell, beside its attempts
METRICS = "eval_results.json"  # Trainer.save_metrics' name; the last thing that a run writes
LOG = "trainer_state.json"  # Trainer.save_state's name
RECIPE = "recipe"  # the setting of a cell that names its recipe, in a sweep over several
MODEL = "model_name_or_path"
# With it, `hf-dp train` leaves out what only a private run reads of the cell's file.
AS_BASELINE = ["--privacy_mode", NON_PRIVATE]
_HF_DP = [sys.executable, "-m", "hf_dp.cli.main"]


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


def with_settings(recipe: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe with these settings; ``peft.r`` is the key ``r`` of the block ``peft``.

    Raises: ConfigError when there is no such block.
    """
    values = copy.deepcopy(dict(recipe))
    for key, value in settings.items():
        block, *inside = key.split(".")
        if key == RECIPE:
            continue  # it says which recipe this is
        if not inside:
            values[block] = value
        elif len(inside) == 1 and isinstance(values.get(block), dict):
            values[block][inside[0]] = value
        else:
            raise ConfigError(
                f"Expected the key {key!r} to be inside a block of the recipe, but the recipe has "
                f"no block `{block}`. Add it, or name a key of the top level."
            )
    return values


def run_cell(
    recipe: dict[str, Any], cell: Cell, which: str, launched: Sequence[str], timed: bool = True
) -> bool:
    """Train one cell, unless its result is there already.

    Args:
        which: the run in words, for a line on stderr.
        launched: the words that ask for several processes, and what else a run's command line says.
        timed: whether the run writes how long it took, beside its output folder.

    Returns: whether the result is there.

    Raises: ConfigError when the folder holds a run of another recipe.
    """
    values = {**with_settings(recipe, cell.settings), "seed": cell.seed}
    values = {
        key: value for key, value in values.items() if value is not None and key != "output_dir"
    }
    config = cell.folder / "config.yaml"
    if config.exists() and (before := read_yaml(str(config))) != values:
        changed = sorted(key for key in {*before, *values} if before.get(key) != values.get(key))
        raise ConfigError(
            f"{cell.folder.name} in `--output-dir` was run with other values of {changed}. Choose "
            "another folder: the results in it are of another recipe, and the record of what its "
            "private runs have spent must not be lost."
        )
    if cell.done is not None:
        return True
    print(f"[{which}] {cell.label} seed={cell.seed}", file=sys.stderr, flush=True)
    cell.folder.mkdir(parents=True, exist_ok=True)
    config.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    # A folder of its own for each attempt: an interrupted run's ledger must stay, and no other run
    # may write beside it.
    output = cell.folder / f"run{len(cell.attempts) + 1}"
    output.mkdir()
    command = [*_HF_DP, "train", "--config", str(config), "--output_dir", str(output), *launched]
    if cell.settings.get("privacy_mode") == NON_PRIVATE:
        command += AS_BASELINE
    times = {VARIABLE: str((cell.folder / TIMES).absolute())} if timed else {}
    with open(cell.folder / "log.txt", "w", encoding="utf-8") as log:
        done = subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **times}
        )
    return done.returncode == 0 and cell.done is not None


def why_it_failed(cell: Cell) -> str:
    """Return the last line that a run wrote, which says why it ended, and where the others are."""
    log = cell.folder / "log.txt"
    written = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    last = [line.strip() for line in written.splitlines() if line.strip()][-1:]
    return " ".join([f"see {log}.", *last])


def result(cell: Cell) -> dict[str, Any]:
    """Return what a run that is done was and found, as ``hf-dp sweep --json`` prints it.

    Epsilon and status are None for a run that is not private.
    """
    from hf_dp.statement.record import FILE_NAME, read

    folder, times = cell.done, cell.folder / TIMES
    assert folder is not None
    found = _read(folder / METRICS, f"Delete it to run {cell.label!r} again.")
    statement = (read(folder).statement if (folder / FILE_NAME).exists() else None) or {}
    return {
        "settings": cell.settings,
        "seed": cell.seed,
        "folder": str(folder),
        "metrics": {
            name.removeprefix("eval_"): value
            for name, value in found.items()
            if not name.endswith("loss")
        },
        "epsilon": statement.get("epsilon"),
        "status": statement.get("status"),
        # none of a run that was made without a clock, or resumed
        "times": _read(times, "Delete it; it has times alone.") if times.exists() else {},
    }


def logs(cell: Cell) -> list[dict[str, Any]]:
    """Return what a run logged over its steps. Raises: ConfigError where it kept nothing."""
    assert cell.done is not None
    history: list[dict[str, Any]] = _read(cell.done / LOG, "Leave --logs out.")["log_history"]
    return history


def _read(path: Path, what_to_do: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{path} cannot be read ({problem}). {what_to_do}") from problem
    return found


def zero_shot(cell: Cell) -> dict[str, float]:
    """Return the metrics of the base before training, with this cell's template and words.

    A head has none. They are computed once and kept.
    """
    kept, config = cell.folder / "zero_shot.json", str(cell.folder / "config.yaml")
    if not read_yaml(config).get("infilling"):
        return {}
    if not kept.exists():
        command = [*_HF_DP, "eval", "--zero-shot", "--json", "--config", config]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(
                f"The zero-shot evaluation of {cell.label!r} failed: "
                f"{done.stderr.strip().splitlines()[-1]} Leave --zero-shot out, or change the "
                "recipe."
            )
        kept.write_text(done.stdout.strip().splitlines()[-1], encoding="utf-8")
    return {name.removeprefix("eval_"): value for name, value in _read(kept, "Delete it.").items()}


def model_size(name: str) -> dict[str, Any]:
    """Return the family of a base model, and its millions of parameters outside embeddings.

    They are what Li et al. count (figures 1 and 6). A distilled model is of its teacher's family.

    Args: name: a Hub name, a folder, or ``package:NAME``; its configuration is read alone.

    Raises: DataError for a model whose configuration cannot be read.
    """
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModel

    from hf_dp.tasks.files import resolve_model

    try:
        config = AutoConfig.from_pretrained(resolve_model(name))
        with torch.device("meta"):  # shapes; no weights are needed
            model = AutoModel.from_config(config)
    except (OSError, ValueError) as problem:
        raise DataError(
            f"The size of the model {name!r} is not known: {str(problem).splitlines()[0]} Give a "
            "Hub name, a folder, or package:NAME."
        ) from problem
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    embedded = {parameter for table in tables for parameter in table.parameters()}
    others = [each for each in model.parameters() if each not in embedded]
    family = str(config.model_type).removeprefix("distil")
    return {"family": family, "parameters": sum(each.numel() for each in others) / 1e6}
