"""Search privately: a secret, random number of runs, of which only the best is released.

Papernot and Steinke 2021 (arXiv 2110.03620), with a geometric number of runs. Each run draws its
settings from the grid, uniformly and independently. Number and settings are drawn once, before the
first run, and kept on disk: a search that goes on after an interruption makes the runs that it
would have made, and nobody can stop it at a good moment and start it with another number.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hf_dp.cli.cells import Cell, result, run_cell, values_of, why_it_failed
from hf_dp.cli.config import DEFAULT_TASK, Recipe
from hf_dp.errors import ConfigError, HfDpError
from hf_dp.plans.dp_sgd import MEAN_RUNS, check_mean_runs

if TYPE_CHECKING:
    from hf_dp.trainer.trainer import DPTrainer

DRAWN, BEST = "search.json", "best"
# Settings that change no event: all runs of a search must cost the same.
MAY_VARY = frozenset(
    """
    adam_bc_floor adam_beta1 adam_beta2 adam_epsilon clipping freeze gguf_file infilling
    learning_rate lr_scheduler_kwargs lr_scheduler_type max_length model_name_or_path optim
    optim_args peft per_example_max_grad_norm warmup_steps weight_decay
    """.split()
)
# What a recipe must leave unset: why, and what then.
_UNSET = {
    "drop_long_rows": "runs may differ in how many rows are left, and so in what they cost. Write "
    "the rows that are short enough to a file.",
    "release": "what is released without noise could decide which run is the best. Remove it.",
    "push_to_hub": "a private selection releases one run. Publish OUTPUT_DIR/best afterwards.",
    "report_to": "a private selection releases one run. Publish OUTPUT_DIR/best afterwards.",
}


@dataclass(frozen=True)
class Search:
    """A private search: settings of every run, the grid from which each draws a cell, the expected
    number of runs, above 1, and the metric of public evaluation rows that decides."""

    recipe: Recipe
    cells: Sequence[Cell]
    mean_runs: float
    score: str

    def __post_init__(self) -> None:
        check_mean_runs("--private-selection", self.mean_runs)
        for name in sorted({key for cell in self.cells for key in cell.settings}):
            if name.partition(".")[0] not in MAY_VARY:
                raise ConfigError(
                    f"A private selection cannot vary {name!r}: it may change what one run costs "
                    f"or trains on. Fix it with --set, and vary only {sorted(MAY_VARY)}."
                )
        if (mode := self.recipe.get("privacy_mode", "dp_sgd")) != "dp_sgd":
            raise ConfigError(f"A private selection needs privacy_mode dp_sgd, got {mode!r}.")
        for name, why in _UNSET.items():
            if (value := self.recipe.get(name)) and value != "none":
                raise ConfigError(
                    f"Expected `{name}` to be unset in a private selection, got {value!r}: {why}"
                )

    @property
    def folder(self) -> Path:
        """Return the folder of the search."""
        return self.cells[0].folder.parent

    @property
    def settings(self) -> Recipe:
        """Return those of every run, JSON-ready: the recipe's, and that it is one of a search."""
        said = self.recipe.get("card") or {}
        card = {"model_name": self.folder.name, **said} if isinstance(said, dict) else said
        own = {"report_to": "none", MEAN_RUNS: self.mean_runs, "card": card}
        return {"accountant": "rdp", **self.recipe, **own}

    @property
    def identity(self) -> dict[str, object]:
        """Return what must be the same when the search goes on."""
        grid = [{**cell.settings, "seed": cell.seed} for cell in self.cells]
        return {"settings": self.settings, "score": self.score, "grid": grid}


@dataclass(frozen=True)
class Found:
    """The run that a search released, and what the whole search costs."""

    folder: Path
    label: str
    score: float
    metric: str
    epsilon: float
    delta: float

    def in_words(self) -> str:
        """Return the result in two lines."""
        return (
            f"best: {self.label or 'recipe'}: {self.metric} {self.score:.4f}; epsilon "
            f"{self.epsilon:.3f} at delta {self.delta:g} for the whole search\n{self.folder}"
        )


def select(search: Search, launched: Sequence[str] = ()) -> Found:
    """Make the runs that are not made, and release the best; return it."""
    drawn = _drawn(search)
    if "released" not in drawn:
        trials = [_trial(search, run) for run in drawn["runs"]]
        scores = []
        for number, cell in enumerate(trials, start=1):
            if not run_cell(search.settings, cell, f"run {number}", launched, timed=False):
                mended = "must stay as it is"
                if _unspent(search):
                    mended = "may change, too: no run has made a step"
                raise ConfigError(
                    f"{cell.label!r} failed; {why_it_failed(cell)}\nNothing is released. Fix the "
                    f"cause and start again: it continues with this run. The recipe {mended}."
                )
            scores.append(_score(search, cell))  # a name that no run has is found after the first
        _refuse_unequal(trials)
        # Of equal ones the first: runs are independent and alike, so that is a random choice.
        ranks = [_rank(search.score, score) for score in scores]
        best = ranks.index(max(ranks))
        drawn = {**drawn, "released": best, "score": scores[best]}
        _write(search.folder / DRAWN, drawn)
    return _release(search, drawn)


def check_runs(search: Search) -> None:
    """Make the trainer of each cell once, before a number of runs is drawn."""
    from hf_dp.cli.tasks import private_task

    first = {cell.label: cell for cell in reversed(search.cells)}  # a seed changes nothing
    for label, cell in first.items():
        with tempfile.TemporaryDirectory() as folder:
            values = {"task": DEFAULT_TASK, **values_of(search.settings, cell)}
            values["output_dir"] = folder
            try:
                scores = _scores_to_come(private_task(values["task"]).trainer_of(values, []))
            except HfDpError as problem:
                raise ConfigError(
                    f"{label or 'The recipe'!r} cannot run, and nothing was started: {problem}"
                ) from problem
        if scores and search.score not in scores:
            raise ConfigError(
                f"Expected `--score` to be one of {scores}, got {search.score!r}. Nothing was "
                "started."
            )


def _scores_to_come(trainer: DPTrainer) -> list[str]:
    """Return the names that a classifier's scores will have; none where they are not known."""
    import numpy as np

    if trainer.compute_metrics is None:
        return []
    logits = np.eye(2, trainer.model.config.num_labels)
    made_up: Any = SimpleNamespace(predictions=logits, label_ids=np.array([0, 1]))
    sets = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"": None}
    prefixes = [f"{name}_" if name else "" for name in sets]
    return [prefix + name for prefix in prefixes for name in trainer.compute_metrics(made_up)]


def _trial(search: Search, run: dict[str, Any]) -> Cell:
    """Return one run. Its folder has a random name: a number would stand in training_args.bin, and
    say how many runs there were at least."""
    cell = search.cells[run["cell"]]
    return Cell(cell.settings, cell.seed, search.folder / run["folder"])


def _drawn(search: Search) -> dict[str, Any]:
    """Return what was drawn, from the file; draw it where the folder is new."""
    path = search.folder / DRAWN
    count = None
    if path.exists():
        drawn: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if drawn.get("search") == json.loads(json.dumps(search.identity)):
            return drawn
        if not _unspent(search):
            raise ConfigError(
                f"{path} belongs to another search: recipe, grid, --private-selection, --score or "
                "--seeds differ. Choose another folder; what was spent in this one counts, too."
            )
        if drawn["search"]["settings"][MEAN_RUNS] == search.mean_runs:
            count = len(drawn["runs"])  # nobody can draw until it suits
    elif search.folder.exists() and any(search.folder.iterdir()):
        raise ConfigError(
            f"Expected `--output-dir` to be a new folder, but {str(search.folder)!r} is not empty "
            f"and has no {DRAWN}. Choose another: a number of runs must not be drawn twice."
        )
    check_runs(search)
    for trial in search.folder.glob("trial-*"):
        shutil.rmtree(trial)
    search.folder.mkdir(parents=True, exist_ok=True)
    runs = [
        {"cell": secrets.randbelow(len(search.cells)), "folder": f"trial-{secrets.token_hex(8)}"}
        for _ in range(count or _geometric(search.mean_runs))
    ]
    drawn = {"search": search.identity, "runs": runs}
    _write(path, drawn)
    return drawn


def _unspent(search: Search) -> bool:
    """Return whether no run of the search has recorded a release."""
    from hf_dp.run.ledger_file import LEDGER

    noted = json.loads((search.folder / DRAWN).read_text(encoding="utf-8"))
    ledgers = search.folder.glob(f"trial-*/run*/{LEDGER}")
    return "released" not in noted and not any(path.stat().st_size for path in ledgers)


def _geometric(mean: float) -> int:
    """Return K >= 1 with P(K = k) = (1 - p)^(k - 1) p and the mean 1 / p, by inversion."""
    uniform = secrets.SystemRandom().random()  # in [0, 1)
    return 1 + int(math.log1p(-uniform) / math.log1p(-1 / mean))


def _score(search: Search, cell: Cell) -> float:
    """Return the score of a run that is done."""
    metrics = result(cell)["metrics"]
    if search.score not in metrics:
        raise ConfigError(
            f"Expected `--score` to be one of {sorted(metrics)}, got {search.score!r}. Start "
            "the search in another folder with one of these."
        )
    return float(metrics[search.score])


def _rank(score: str, value: float) -> float:
    """Return a score of which the larger is the better, and one that is not a number is worst."""
    if math.isnan(value):
        return -math.inf
    return -value if score.endswith("perplexity") else value


def _refuse_unequal(trials: Sequence[Cell]) -> None:
    """Raise ConfigError unless all runs were planned and ran alike."""
    from hf_dp.statement.evidence import read

    records = [read(cell.done) for cell in trials if cell.done is not None]
    kinds = {json.dumps([r.ledger.to_list(), r.plan.delta, r.plan.num_examples]) for r in records}
    if len(records) != len(trials) or len(kinds) != 1 or any(r.no_epsilon for r in records):
        raise ConfigError(
            "The runs of this search did not all release the same events, so its bound does not "
            "hold. Nothing is released. Start again in another folder, with the same rows and "
            "budget for all runs."
        )


def _release(search: Search, drawn: dict[str, Any]) -> Found:
    """Move the best run to its place and delete the others, and their number, which must stay
    secret; also after an interruption in between."""
    from hf_dp.statement.evidence import read

    target = search.folder / BEST
    if not target.exists():
        done = _trial(search, drawn["runs"][drawn["released"]]).done
        if done is None:
            raise ConfigError(f"The best run was moved or deleted from {search.folder}.")
        os.replace(done, target)
    for path in search.folder.glob("trial-*"):
        shutil.rmtree(path)
    if "runs" in drawn:
        cell = _trial(search, drawn["runs"][drawn["released"]])
        drawn = {key: value for key, value in drawn.items() if key != "runs"}
        drawn |= {"released": 0, "label": f"{cell.label} seed={cell.seed}".strip()}
        _write(search.folder / DRAWN, drawn)
    statement = read(target).statement
    if statement is None or statement["epsilon"] is None:
        raise HfDpError(f"{target} states no epsilon; `hf-dp account ledger` says why.")
    cost = statement["epsilon"], statement["delta"]
    return Found(target, drawn["label"], drawn["score"], search.score, *cost)


def _write(path: Path, values: Mapping[str, object]) -> None:
    """Replace the file durably; only its owner may read it."""
    from hf_dp.statement.durable import replace_file

    replace_file(path, [json.dumps(values).encode()])
    path.chmod(0o600)
