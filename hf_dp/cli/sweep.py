"""``hf-dp sweep``: train over a grid of settings and seeds, and report what the runs cost together.

An interrupted sweep is resumed by the same command.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hf_dp.cli.cells import METRICS, Cell, in_words
from hf_dp.cli.config import read_yaml
from hf_dp.cli.launch import add_launch_options, launch_words, refuse_several
from hf_dp.cli.sweep_report import plot_over_zero_shot, plot_sweep, spent_together, table
from hf_dp.errors import ConfigError

EXAMPLES = """examples:
  hf-dp sweep --config recipes/sst2/minilm_dp_adam_eps3.yaml --seeds 0 1 2 \\
      --grid target_epsilon=3,8 learning_rate=5e-4,1e-3 --output-dir outputs/sweep
  hf-dp sweep --config recipe.yaml --grid infilling=null,sst2 target_epsilon=3,8 \\
      --output-dir outputs/words --plot words.png

Runs that are done are not repeated: start the same command again after an interruption. Every
private run on the same rows adds its epsilon; the last line says what all runs in the table cost
together. A search that releases only the best of a secret, random number of runs can cost as little
as a few of them, but a grid is no such search: `hf-dp account search --help` states the conditions.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(
        "hf-dp sweep",
        description="Train a recipe once for every combination of the given values and seeds.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="the recipe whose settings are varied")
    add(
        "--grid",
        nargs="+",
        default=[],
        metavar="KEY=A,B",
        help="values of a key (peft.r: in a block), as YAML; all combinations are run",
    )
    add(
        "--set",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="keys that are the same in all runs",
    )
    add(
        "--seeds",
        nargs="+",
        type=int,
        default=[0],
        metavar="SEED",
        help="seeds of initialization (default: 0)",
    )
    add("--output-dir", required=True, metavar="FOLDER", help="a folder for each run below it")
    add(
        "--zero-shot",
        action="store_true",
        help="also evaluate each untrained base, with its template and words",
    )
    add(
        "--plot",
        metavar="PATH",
        help="write a PNG, PDF or SVG: a curve, heat map or bars; with --zero-shot, trained over "
        "untrained accuracy",
    )
    add("--dry-run", action="store_true", help="print the runs and stop")
    add_launch_options(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run what is not done and print the table; return 1 if a run failed, 2 for a bad grid."""
    args = build_parser().parse_args(list(argv))
    refuse_several("hf-dp sweep", "Start it alone: `--num_processes` divides each of its runs.")
    launched = launch_words(args)
    if args.plot is not None:
        from hf_dp._plotting import require_matplotlib

        require_matplotlib(args.plot)
    recipe = with_settings(read_yaml(args.config), dict(_setting(word) for word in args.set))
    if Path(args.output_dir).is_file():
        raise ConfigError(
            f"Expected `--output-dir` to be a folder, but {args.output_dir!r} is a file. Choose "
            "another name."
        )
    cells = list(grid(args.grid, args.seeds, Path(args.output_dir)))
    if args.dry_run:
        print("\n".join(f"{cell.label} seed={cell.seed}: {cell.folder}" for cell in cells))
        return 0
    failed = [
        cell
        for number, cell in enumerate(cells)
        if not _run(recipe, cell, f"{number + 1} of {len(cells)}", launched)
    ]
    results = {cell: result(cell) for cell in cells if cell not in failed}
    if args.zero_shot:
        for cell, found in results.items():
            found["zero_shot"] = zero_shot(cell)
    print(table(results))
    if spent := spent_together(cells):
        print(spent)
    if args.plot is not None and results:
        (plot_over_zero_shot if args.zero_shot else plot_sweep)(results, args.plot)
    for cell in failed:
        print(
            f"failed: {cell.label} seed={cell.seed}; see {cell.folder / 'log.txt'}", file=sys.stderr
        )
    return 1 if failed else 0


def grid(words: Sequence[str], seeds: Sequence[int], folder: Path) -> Iterator[Cell]:
    """Yield all combinations.

    Raises: ConfigError for a word that is not KEY=VALUES, or a key that comes twice.
    """
    axes: dict[str, list[Any]] = {}
    for word in words:
        key, _, text = word.partition("=")
        if not key or not text or key in axes:
            raise ConfigError(
                f"Expected each word of `--grid` to be KEY=A,B with a new key, got {word!r}. "
                "For example --grid learning_rate=1e-4,1e-3."
            )
        _refuse_own(key)
        axes[key] = _yaml(f"[{text}]", word)
    for what, given in {**axes, "--seeds": list(seeds)}.items():
        if len({json.dumps(value, sort_keys=True) for value in given}) < len(given):
            raise ConfigError(
                f"Expected the values of {what} to be different from each other, got {given}. "
                "Leave the repeated ones out."
            )
    for values in itertools.product(*axes.values()):
        settings = dict(zip(axes, values, strict=True))
        name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
        for seed in seeds:
            yield Cell(settings, seed, folder / f"{_name(settings)}-{name}-seed{seed}")


def _name(settings: dict[str, Any]) -> str:
    text = "-".join(f"{key}={in_words(value)}" for key, value in settings.items()) or "run"
    return "".join(letter if letter.isalnum() or letter in "=-._" else "_" for letter in text)[:80]


def _setting(word: str) -> tuple[str, Any]:
    key, equals, text = word.partition("=")
    if not equals:
        raise ConfigError(
            f"Expected each word of `--set` to be KEY=VALUE, got {word!r}. "
            "For example --set max_steps=100."
        )
    _refuse_own(key)
    return key, _yaml(text, word)


def _refuse_own(key: str) -> None:
    """Raise ConfigError for a key that the sweep itself sets."""
    if key in ("seed", "output_dir"):
        raise ConfigError(
            f"`{key}` is the sweep's own: use {'--seeds' if key == 'seed' else '--output-dir'}."
        )


def _yaml(text: str, word: str) -> Any:
    try:
        value = yaml.safe_load(text)
        json.dumps(value)
    except (yaml.YAMLError, TypeError) as problem:
        raise ConfigError(
            f"{word!r} is no plain YAML value: {str(problem).splitlines()[0]} Quote it, or write "
            "text, a number, a list or a mapping."
        ) from problem
    return value


def with_settings(recipe: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe with these settings; ``peft.r`` is the key ``r`` of the block ``peft``.

    Raises: ConfigError when there is no such block.
    """
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
    return values


def _run(recipe: dict[str, Any], cell: Cell, which: str, launched: Sequence[str]) -> bool:
    """Train one cell in a process of its own, unless its result is there already.

    Args:
        launched: the words that ask for several processes.

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
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT)
    return done.returncode == 0 and cell.done is not None


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
    }


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
