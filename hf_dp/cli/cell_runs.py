"""Run the cells of a sweep, each in a process of its own, and read what they found."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hf_dp.cli.cells import METRICS, RECIPE, TIMES, Cell
from hf_dp.cli.config import read_yaml
from hf_dp.cli.non_private import NON_PRIVATE
from hf_dp.errors import ConfigError
from hf_dp.run.clock import VARIABLE

# With it, `hf-dp train` leaves out what only a private run reads of the cell's file.
AS_BASELINE = ["--privacy_mode", NON_PRIVATE]


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
    """Train one cell in a process of its own, unless its result is there already.

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
    with open(cell.folder / "log.txt", "w", encoding="utf-8") as log:
        # A folder of its own for each attempt: an interrupted run's ledger must stay, and no other
        # run may write beside it.
        output = cell.folder / f"run{len(cell.attempts) + 1}"
        output.mkdir()
        command = [
            sys.executable,
            "-m",
            "hf_dp.cli.main",
            "train",
            "--config",
            str(config),
            "--output_dir",
            str(output),
            *launched,
        ]
        if cell.settings.get("privacy_mode") == NON_PRIVATE:
            command += AS_BASELINE
        times = {VARIABLE: str((cell.folder / TIMES).absolute())} if timed else {}
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
    """Return ``{"metrics": {"accuracy": 0.9}, "epsilon": 2.4}`` of a run that is done.

    Epsilon is None for a run that is not private.
    """
    from hf_dp.statement.record import FILE_NAME, read

    folder = cell.done
    assert folder is not None
    try:
        found = json.loads((folder / METRICS).read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ConfigError(
            f"{folder / METRICS} is damaged ({problem}). Delete it to run {cell.label!r} again."
        ) from problem
    metrics = {
        name.removeprefix("eval_"): value
        for name, value in found.items()
        if not name.endswith("loss")
    }
    private = (folder / FILE_NAME).exists()
    statement = read(folder).statement if private else None
    return {
        "metrics": metrics,
        "epsilon": None if statement is None else statement["epsilon"],
        "status": None if statement is None else statement["status"],
        "times": _times(cell.folder / TIMES),
    }


def _times(path: Path) -> dict[str, dict[str, float]]:
    """Return the times of a run; none for one that was made without a clock, or resumed."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def zero_shot(cell: Cell) -> dict[str, float]:
    """Return the metrics of the base before training, with this cell's template and words.

    A head has none. They are computed once and kept.
    """
    kept = cell.folder / "zero_shot.json"
    if not read_yaml(str(cell.folder / "config.yaml")).get("infilling"):
        return {}
    if not kept.exists():
        command = [
            sys.executable,
            "-m",
            "hf_dp.cli.main",
            "eval",
            "--zero-shot",
            "--json",
            "--config",
        ]
        done = subprocess.run(
            [*command, str(cell.folder / "config.yaml")], capture_output=True, text=True
        )
        if done.returncode:
            raise ConfigError(
                f"The zero-shot evaluation of {cell.label!r} failed: "
                f"{done.stderr.strip().splitlines()[-1]} Leave --zero-shot out, or change the "
                "recipe."
            )
        kept.write_text(done.stdout.strip().splitlines()[-1], encoding="utf-8")
    return {
        name.removeprefix("eval_"): value
        for name, value in json.loads(kept.read_text(encoding="utf-8")).items()
    }
