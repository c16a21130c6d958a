"""``hf-dp sweep``: train over a grid of settings and seeds, and report what the runs cost
together."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_dp.cli import cells as runs
from hf_dp.cli.config import AS_BASELINE, NON_PRIVATE, Recipe, private_keys, read_yaml
from hf_dp.cli.launch import add_launch_options, launch_words, refuse_several
from hf_dp.cli.options import Parser
from hf_dp.cli.tasks import check_recipe
from hf_dp.cli.train import with_recipe
from hf_dp.errors import ConfigError
from hf_dp.statement.wording import NOT_PRIVATE, PROVEN_WEIGHTS_ONLY, STATUSES

EXAMPLES = """examples:
  hf-dp sweep --config recipes/sst2/minilm_dp_adam_eps3.yaml --seeds 0 1 2 \\
      --grid target_epsilon=3,8 learning_rate=5e-4,1e-3 --output-dir outputs/sweep
  hf-dp sweep --config recipe.yaml --grid privacy_mode=dp_sgd,non_private target_epsilon=3,8 \\
      --output-dir outputs/beside
  hf-dp sweep --config recipe.yaml --grid learning_rate=5e-4,1e-3,2e-3 --private-selection 5 \\
      --score accuracy --output-dir outputs/search

Several recipes are run over the same grid. Their names are a setting like any other.

With privacy_mode=dp_sgd,non_private in the grid, one run without privacy stands beside the private
ones; the privacy arguments of grid and recipe are not its own.

Runs that are done are not repeated: start the same command again after an interruption. Every
private run on the same rows adds its epsilon; the last line says what all runs in the table cost
together.

With --private-selection K, target_epsilon is that of the whole search. A secret, random number of
runs (K on average) is made, each with values drawn from the grid. The run with the best score is
moved to OUTPUT_DIR/best, and the others are deleted. Publish nothing else of the folder, and choose
by evaluation data that is public: epsilon does not cover it. The number of runs stays secret, and
no run is stopped or changed because of its score. `hf-dp plan --private_selection_mean_runs K
--accountant rdp` says what a search costs.
"""


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(
        "hf-dp sweep",
        description="Train a recipe once for every combination of the given values and seeds.",
        epilog=EXAMPLES,
    )
    option, words = parser.option, {"nargs": "+", "default": []}
    of_several = "the recipe whose settings are varied; several recipes are each run"
    option("--config", of_several, "FILE", nargs="+", required=True)
    combined = "values of a key (peft.r: in a block), as YAML; all combinations are run"
    option("--grid", combined, "KEY=A,B", **words)
    option("--set", "keys that are the same in all runs", "KEY=VALUE", **words)
    seeds = "seeds of initialization (default: 0)"
    option("--seeds", seeds, "SEED", nargs="+", type=int, default=[0])
    option("--output-dir", "each run gets a folder in it", "FOLDER", required=True)
    search = "release only the best of a secret, random number of runs, K on average; epsilon is "
    option("--private-selection", f"{search}that of the whole search", "K", type=float)
    score = "with it: the metric that decides (larger is better, except for perplexity)"
    option("--score", score, "NAME")
    parser.switch("--zero-shot", "also evaluate each untrained base, with its template and words")
    parser.switch("--json", "one JSON object instead of the table, which hf-dp figure draws")
    parser.switch("--logs", "with --json: also what each run logged over its steps")
    parser.switch("--dry-run", "print the runs and stop")
    add_launch_options(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run what is not done and print the table; return 1 if a run failed, 2 for a bad grid."""
    args = build_parser().parse_args(list(argv))
    refuse_several("hf-dp sweep", "Start it alone: `--num_processes` divides each of its runs.")
    launched, fixed = launch_words(args), dict(runs.setting(word) for word in args.set)
    recipes = _read_recipes(args.config, fixed)
    cells = list(runs.grid(args.grid, args.seeds, Path(args.output_dir), list(recipes)))
    of = {cell: recipes[cell.settings.get(runs.RECIPE, next(iter(recipes)))] for cell in cells}
    for cell in cells:
        runs.with_settings(of[cell], cell.settings)  # raises before the first run
    _check(args, fixed, cells)
    if fixed.get("privacy_mode") == NON_PRIVATE:
        launched = [*launched, *AS_BASELINE]
    if args.dry_run:
        print("\n".join(f"{cell.label} seed={cell.seed}: {cell.folder}" for cell in cells))
        return 0
    if args.private_selection is not None:
        from hf_dp.cli.private_selection import Search, select

        (recipe,) = recipes.values()
        search = Search(recipe, cells, args.private_selection, args.score)
        print(select(search, launched).in_words())
        return 0
    failed = [
        cell
        for number, cell in enumerate(cells, start=1)
        if not runs.run_cell(of[cell], cell, f"{number} of {len(cells)}", launched)
    ]
    done = [cell for cell in cells if cell not in failed]
    rows = [runs.result(cell, untrained=args.zero_shot, logs=args.logs) for cell in done]
    spent = runs.spent_together(cells)
    if args.json:
        print(json.dumps({"rows": rows, "together": spent}))
    else:
        print("\n".join(filter(None, [table(done, rows), spent])))
    for cell in failed:
        print(f"failed: {cell.label} seed={cell.seed}; {runs.why_it_failed(cell)}", file=sys.stderr)
    return 1 if failed else 0


def _read_recipes(paths: Sequence[str], fixed: Recipe) -> dict[str, Recipe]:
    """Return the recipes by name, which is the path below the folder that they share, without its
    ending; ``fixed`` is set in all, and the cards of their runs name the file."""
    files = [Path(path).resolve() for path in paths]
    shared = os.path.commonpath([file.parent for file in files])
    found: dict[str, Recipe] = {}
    for path, file in zip(paths, files, strict=True):
        name = file.relative_to(shared).with_suffix("").as_posix()
        if name in found:
            raise ConfigError(
                f"Expected the recipes of `--config` to have different names, got {path!r} twice. "
                "Leave one out, or rename it."
            )
        found[name] = with_recipe(runs.with_settings(read_yaml(path), fixed), path)
        check_recipe(found[name])
    return found


def _check(args: argparse.Namespace, fixed: Recipe, cells: Sequence[runs.Cell]) -> None:
    """Raise ConfigError for options that do not go together."""
    if Path(args.output_dir).is_file():
        raise ConfigError(f"Expected `--output-dir` to be a folder: {args.output_dir!r} is a file.")
    if args.logs and not args.json:
        raise ConfigError("`--logs` adds what runs logged to their JSON. Add --json.")
    if args.score and args.private_selection is None:
        raise ConfigError("`--score` decides in a private search. Add --private-selection K.")
    if args.private_selection is not None:
        for option in ("zero_shot", "json"):
            if getattr(args, option):
                raise ConfigError(
                    f"`--{option.replace('_', '-')}` shows all runs, and a private selection "
                    "releases one. Leave it out."
                )
        if not args.score or len(args.config) > 1:
            raise ConfigError(
                "`--private-selection` needs the metric that decides (--score accuracy) and one "
                f"recipe in `--config`, got {args.score} and {args.config}."
            )
    for name in fixed.keys() & cells[0].settings.keys():
        raise ConfigError(
            f"Expected `{name}` to stand in `--set` or in `--grid`, got both. Leave one out."
        )
    modes = {cell.settings.get("privacy_mode", fixed.get("privacy_mode")) for cell in cells}
    given = {**fixed, **cells[0].settings}.keys() & (
        private_keys() if modes == {NON_PRIVATE} else set()
    )
    if given:
        raise ConfigError(
            f"Expected no privacy arguments beside privacy_mode={NON_PRIVATE}, got "
            f"{sorted(given)}. Remove them; those of the recipe are left out automatically."
        )


def table(cells: Sequence[runs.Cell], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return each combination's metrics: mean over its seeds, and the smallest and largest."""
    by_label: dict[str, list[Mapping[str, Any]]] = {}
    for cell, row in zip(cells, rows, strict=True):
        by_label.setdefault(cell.label, []).append(row)
    lines = [f"{label or 'recipe'}: {'; '.join(_said(each))}" for label, each in by_label.items()]
    if any(row.get("times") for row in rows):
        lines.append(
            "times: training in the main process, including a selection; epsilon does not cover "
            "them"
        )
    return "\n".join(lines)


def _said(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Yield what the runs of one combination found and took."""
    for metric in sorted({metric for row in rows for metric in row["metrics"]}):
        values = [row["metrics"][metric] for row in rows if metric in row["metrics"]]
        spread = f" ({min(values):.4f} to {max(values):.4f}, {len(values)} seeds)"
        yield f"{metric} {statistics.mean(values):.4f}{spread * (len(values) > 1)}"
    row = rows[0]
    for metric, value in sorted(row.get("zero_shot", {}).items()):
        yield f"zero-shot {metric} {value:.4f}"
    if "size" in row:
        yield f"{row['size']['parameters']:.1f} M parameters without embeddings"
    for part in ("training", "selection"):
        found = [each["times"][part] for each in rows if part in each.get("times", {})]
        if found:
            wall, cpu = (
                statistics.mean(one[kind] for one in found) for kind in ("wall", "processor")
            )
            yield f"{part} {wall:.1f} s (processor {cpu:.1f} s)"
    status = row.get("status") or NOT_PRIVATE
    only = " (of the weights only)" if status == PROVEN_WEIGHTS_ONLY else ""
    epsilon = row["epsilon"]
    yield STATUSES[status] if epsilon is None else f"epsilon {epsilon:.3f} a run{only}"
