"""The runs of a sweep: which there are, where they write, what they found, and what they cost
together. Each runs in a process of its own."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hf_dp.cli import config
from hf_dp.cli.config import NON_PRIVATE, Recipe, read_yaml
from hf_dp.cli.tasks import private_task
from hf_dp.errors import ConfigError, DataError
from hf_dp.run.clock import VARIABLE

METRICS = "eval_results.json"  # Trainer.save_metrics' name; the last thing that a run writes
RECIPE = "recipe"  # the setting of a cell that names its recipe, in a sweep over several
MODEL = "model_name_or_path"
_TIMES = "times.json"  # in the folder of a cell, beside its attempts
_HF_DP = [sys.executable, "-m", "hf_dp.cli.main"]
_OWN = {"seed": "--seeds", "output_dir": "--output-dir", RECIPE: "--config A.yaml B.yaml"}


@dataclass(frozen=True, eq=False)
class Cell:
    """One run: what it sets beside the recipe, and where it writes."""

    settings: Recipe
    seed: int
    folder: Path

    @property
    def attempts(self) -> list[Path]:
        """Return the output folders of all attempts: what an interrupted one has spent counts."""
        return sorted(self.folder.glob("run*"), key=lambda path: int(path.name.removeprefix("run")))

    @property
    def done(self) -> Path | None:
        """Return the output folder of the attempt that was completed."""
        return next((path for path in self.attempts if (path / METRICS).exists()), None)

    @property
    def label(self) -> str:
        """Return the settings in words."""
        return " ".join(f"{key}={in_words(value)}" for key, value in self.settings.items())


def in_words(value: object) -> str:
    """Return a value in words; an infilling block as its label words and its template."""
    if isinstance(value, dict) and isinstance(value.get("label_words"), dict):
        return f"{'/'.join(map(str, value['label_words'].values()))} in {value.get('template')!r}"
    return str(value)


# -- the grid ---


def setting(word: str, option: str = "--set") -> tuple[str, Any]:
    """Return key and value of KEY=VALUE; of ``--grid``, the values."""
    key, _, text = word.partition("=")
    if key in _OWN:
        raise ConfigError(f"`{key}` is the sweep's own: use {_OWN[key]}.")
    if not key or not text:
        raise ConfigError(f"Expected `{option}` KEY=VALUE (of --grid KEY=A,B), got {word!r}.")
    try:
        value = config.load_yaml(text if option == "--set" else f"[{text}]")
        json.dumps(value)
    except (yaml.YAMLError, TypeError) as problem:
        raise ConfigError(
            f"{word!r} is not a plain YAML value: {str(problem).splitlines()[0]}. Text with "
            "brackets needs quotes inside the shell's: \"train_split='train[:20]','train[20:]'\"."
        ) from problem
    return key, value


def grid(
    words: Sequence[str], seeds: Sequence[int], folder: Path, recipes: Sequence[str] = ()
) -> Iterator[Cell]:
    """Yield all combinations of KEY=A,B, each with each seed, and of several recipes with each."""
    axes: dict[str, list[object]] = {RECIPE: list(recipes)} if len(recipes) > 1 else {}
    for word in words:
        key, values = setting(word, "--grid")
        if key in axes:
            raise ConfigError(f"Expected the keys of `--grid` to be different, got {word!r} twice.")
        axes[key] = values
    lists: dict[str, list[object]] = {**axes, "--seeds": list(seeds)}
    for what, given in lists.items():
        # 1 and 1.0 are the same, 1 and true are not
        typed = [(isinstance(value, bool), value) for value in given]
        if any(value in typed[:place] for place, value in enumerate(typed)):
            raise ConfigError(f"Expected the values of {what} to be different, got {given}.")
    for settings in _combinations(axes):
        label = "-".join(f"{key}={in_words(value)}" for key, value in settings.items()) or "run"
        plain = "".join(each if each.isalnum() or each in "=-._" else "_" for each in label)[:80]
        mark = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
        for seed in seeds:
            yield Cell(settings, seed, folder / f"{plain}-{mark}-seed{seed}")


def _combinations(axes: dict[str, list[object]]) -> Iterator[Recipe]:
    """Yield each combination once. Beside private runs, one without privacy is one, whatever the
    values of the grid's privacy arguments."""
    several = len(axes.get("privacy_mode", [])) > 1
    found: dict[str, Recipe] = {}
    for values in itertools.product(*axes.values()):
        settings = dict(zip(axes, values, strict=True))
        if several and settings["privacy_mode"] == NON_PRIVATE:
            unread = config.private_keys() - {config.BATCH}
            settings = {key: value for key, value in settings.items() if key not in unread}
        found.setdefault(json.dumps(settings, sort_keys=True), settings)
    yield from found.values()


def with_settings(recipe: Recipe, settings: Recipe) -> Recipe:
    """Return the recipe with these settings; ``peft.r`` is the key ``r`` of the block ``peft``."""
    values = copy.deepcopy(dict(recipe))
    for key, value in settings.items():
        block, *inside = key.split(".")
        if not inside:
            values[block] = value
        elif len(inside) == 1 and isinstance(values.get(block), dict):
            values[block][inside[0]] = value
        else:
            raise ConfigError(
                f"Expected the key {key!r} to be inside a block of the recipe, but the recipe has "
                f"no block `{block}`. Add it, or name a key of the top level."
            )
    values.pop(RECIPE, None)  # it says which recipe this is
    return values


def values_of(recipe: Recipe, cell: Cell) -> Recipe:
    """Return the keys of a run, without where it writes."""
    values = {**with_settings(recipe, cell.settings), "seed": cell.seed, "output_dir": None}
    return {key: value for key, value in values.items() if value is not None}


# -- a run ---


def run_cell(
    recipe: Recipe, cell: Cell, which: str, launched: Sequence[str], timed: bool = True
) -> bool:
    """Train one cell, unless its result is there already; return whether it is there.

    Args: which: the run in words. launched: what asks for several processes. timed: whether it
        writes how long it took, beside its output folder.
    """
    values = values_of(recipe, cell)
    file = cell.folder / "config.yaml"
    if file.exists() and (before := read_yaml(str(file))) != values:
        changed = sorted(key for key in {*before, *values} if before.get(key) != values.get(key))
        raise ConfigError(
            f"{cell.folder.name} in `--output-dir` was run with other values of {changed}. Choose "
            "another folder: the evidence of what its private runs have spent must not be lost."
        )
    if cell.done is not None:
        return True
    print(f"[{which}] {cell.label} seed={cell.seed}", file=sys.stderr, flush=True)
    cell.folder.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    # A folder of its own for each attempt: an interrupted run's ledger must stay, and no other run
    # may write beside it.
    output = cell.folder / f"run{len(cell.attempts) + 1}"
    output.mkdir()
    command = [*_HF_DP, "train", "--config", str(file), "--output_dir", str(output), *launched]
    if cell.settings.get("privacy_mode") == NON_PRIVATE:
        command += config.AS_BASELINE
    times = {VARIABLE: str((cell.folder / _TIMES).absolute())} if timed else {}
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


def result(cell: Cell, *, untrained: bool = False, logs: bool = False) -> Recipe:
    """Return what a run that is done was and found, as ``hf-dp sweep --json`` prints it; epsilon
    and status are None for one that is not private."""
    from hf_dp.statement.evidence import FILE_NAME, read

    folder, times = cell.done, cell.folder / _TIMES
    assert folder is not None
    statement = (read(folder).statement if (folder / FILE_NAME).exists() else None) or {}
    found = {
        "settings": cell.settings,
        "seed": cell.seed,
        "folder": str(folder),
        "metrics": _scores(_read(folder / METRICS)),
        "epsilon": statement.get("epsilon"),
        "status": statement.get("status"),
        # none of a run that was made without a clock, or resumed
        "times": _read(times) if times.exists() else {},
    }
    if untrained:
        found["zero_shot"] = _zero_shot(cell)
    if logs:
        found["logs"] = _read(folder / "trainer_state.json")["log_history"]
    if MODEL in cell.settings and (size := model_size(cell.settings[MODEL])):
        found["size"] = size
    return found


def _scores(found: Mapping[str, float]) -> dict[str, float]:
    kept = {name: value for name, value in found.items() if not name.endswith("loss")}
    return {name.removeprefix("eval_"): value for name, value in kept.items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ConfigError(
            f"{path} cannot be read ({problem}). Delete it, and it is made again. If "
            "trainer_state.json is missing, leave --logs out."
        ) from problem
    return found


def _zero_shot(cell: Cell) -> dict[str, float]:
    """Return the metrics of the base before training, computed once; a head has none."""
    kept, values = cell.folder / "zero_shot.json", read_yaml(str(cell.folder / "config.yaml"))
    if not values.get("infilling"):
        return {}
    if not kept.exists():
        module = private_task(values.get("task", config.DEFAULT_TASK))
        metrics, _ = module.evaluate(values, (), zero_shot=True)
        kept.write_text(json.dumps(metrics), encoding="utf-8")
    return {name.removeprefix("eval_"): value for name, value in _read(kept).items()}


def model_size(name: str) -> dict[str, object]:
    """Return the family of a base model, that of its teacher for a distilled one, and its millions
    of parameters outside embeddings, as Li et al. count; nothing for a model that is not here."""
    from torch import nn
    from transformers import AutoModel

    from hf_dp.tasks.models import architecture

    try:
        model = architecture(name, lambda _: AutoModel)
    except DataError:
        return {}
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    embedded = {parameter for table in tables for parameter in table.parameters()}
    others = sum(each.numel() for each in model.parameters() if each not in embedded)
    return {"family": model.config.model_type.removeprefix("distil"), "parameters": others / 1e6}


# -- all runs together ---


def spent_together(cells: Sequence[Cell]) -> str:
    """Return what all private runs of the sweep, unfinished ones included, cost on the rows that
    they share. A guarantee at the smallest delta holds at every larger one."""
    from hf_dp.accounting import epsilon
    from hf_dp.plans.units import FEATURES, weakest_unit
    from hf_dp.run.ledger_file import LEDGER
    from hf_dp.run.witnesses import read_run
    from hf_dp.statement.evidence import FILE_NAME, earlier_runs

    folders = [path for cell in cells for path in cell.attempts]
    # A ledger without a byte, which a full disk leaves, is of a run that released nothing.
    ledgers = {path: path / LEDGER for path in folders}
    records = [
        read_run(path)
        for path, own in ledgers.items()
        if (path / FILE_NAME).exists() or (own.exists() and own.stat().st_size)
    ]
    if not records:
        return ""
    plans = [evidence.plan for evidence in records]
    events = [event for evidence in records for event in evidence.ledger.events]
    for each in records:
        if reason := each.no_epsilon:
            who = f"run {each.run_id[:8]}"
            return f"no epsilon holds for all private runs together: of {who}, {reason}"
    # whose data a run protects, in words that tell two columns of users apart
    owners = {
        "one row" if plan.users is None else f"one {plan.users.name} by {plan.users.column!r}"
        for plan in plans
    }
    if len(owners) > 1:
        return (
            f"these {len(records)} private runs protect different units "
            f"({', '.join(sorted(owners))}): no epsilon is stated for all together"
        )
    whose = owners.pop()
    runs = [run for each in records for run in earlier_runs(each)]
    if any(run.rows_are_chunks for run in runs):
        whose += " (a chunk of a longer text)"
    if weakest_unit(plan.unit for plan in plans) == FEATURES:
        whose += " without its label, which is public"
    delta = min(plan.delta for plan in plans)
    besides = (
        "; some also released values without noise, which no epsilon covers"
        if any(run.released for run in runs)
        else ""
    )
    return (
        f"all {len(records)} private runs together: epsilon "
        f"{epsilon(events, delta, 'rdp').rounded_up(3)} at delta {delta:g} (rdp, a bound) for "
        f"{whose}; that is what holds for anyone who sees more than one of them{besides}"
    )
