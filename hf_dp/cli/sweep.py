"""``hf-dp sweep``: train over a grid of settings and seeds, and report what the runs cost together.

An interrupted sweep is resumed by the same command.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_dp.cli.cell_runs import (
    AS_BASELINE,
    MODEL,
    RECIPE,
    Cell,
    logs,
    model_size,
    result,
    run_cell,
    why_it_failed,
    with_settings,
    zero_shot,
)
from hf_dp.cli.grid import grid, read_recipes, setting
from hf_dp.cli.launch import add_launch_options, launch_words, refuse_several
from hf_dp.cli.non_private import NON_PRIVATE, private_keys
from hf_dp.cli.options import Parser
from hf_dp.cli.sweep_report import best, spent_together, table
from hf_dp.errors import ConfigError, DataError

EXAMPLES = """examples:
  hf-dp sweep --config recipes/sst2/minilm_dp_adam_eps3.yaml --seeds 0 1 2 \\
      --grid target_epsilon=3,8 learning_rate=5e-4,1e-3 --output-dir outputs/sweep
  hf-dp sweep --config recipe.yaml --grid privacy_mode=dp_sgd,non_private target_epsilon=3,8 \\
      --output-dir outputs/beside
  hf-dp sweep --config full.yaml lora.yaml frost.yaml --grid target_epsilon=0.5,2,8 \\
      --seeds 0 1 2 --output-dir outputs/methods --json > methods.json
  hf-dp figure methods.json --x target_epsilon --y accuracy -o methods.png
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
by evaluation data that is public: epsilon does not cover it. `hf-dp account search --help` states
the conditions.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = Parser(
        "hf-dp sweep",
        description="Train a recipe once for every combination of the given values and seeds.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    add(
        "--config",
        nargs="+",
        required=True,
        metavar="FILE",
        help="the recipe whose settings are varied; of several, each is run",
    )
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
        "--best",
        metavar="NAME",
        help="also name the combination with the best mean of this metric (larger is better, "
        "except for perplexity)",
    )
    add(
        "--zero-shot",
        action="store_true",
        help="also evaluate each untrained base, with its template and words",
    )
    add(
        "--json",
        action="store_true",
        help="one JSON object on stdout instead of the table, for hf-dp figure: of each run its "
        "settings, seed, metrics, epsilon, times and, in a grid over models, size",
    )
    add("--logs", action="store_true", help="with --json: also what each run logged over its steps")
    add(
        "--private-selection",
        type=float,
        metavar="K",
        help="release only the best of a secret, random number of runs, K on average; epsilon is "
        "that of the whole search",
    )
    add(
        "--score",
        metavar="NAME",
        help="with it: the metric that decides (larger is better, except for perplexity)",
    )
    add("--dry-run", action="store_true", help="print the runs and stop")
    add_launch_options(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run what is not done and print the table; return 1 if a run failed, 2 for a bad grid."""
    args = build_parser().parse_args(list(argv))
    refuse_several("hf-dp sweep", "Start it alone: `--num_processes` divides each of its runs.")
    launched = launch_words(args)
    if args.logs and not args.json:
        raise ConfigError("`--logs` adds what runs logged to their JSON. Add --json.")
    fixed = dict(setting(word) for word in args.set)
    recipes = read_recipes(args.config, fixed)
    if Path(args.output_dir).is_file():
        raise ConfigError(
            f"Expected `--output-dir` to be a folder, but {args.output_dir!r} is a file. Choose "
            "another name."
        )
    if args.score and args.private_selection is None:
        raise ConfigError(
            "`--score` decides in a private search. Add --private-selection K; or, to see which "
            "combination of all is the best, --best NAME."
        )
    cells = list(grid(args.grid, args.seeds, Path(args.output_dir), list(recipes)))
    of = {cell: recipes[cell.settings.get(RECIPE, next(iter(recipes)))] for cell in cells}
    for cell in cells:
        with_settings(of[cell], cell.settings)  # raises before the first run
    _refuse_privacy_arguments(fixed, cells)
    if fixed.get("privacy_mode") == NON_PRIVATE:
        launched = [*launched, *AS_BASELINE]
    if args.dry_run:
        print("\n".join(f"{cell.label} seed={cell.seed}: {cell.folder}" for cell in cells))
        return 0
    if args.private_selection is not None:
        return _select(args, recipes, cells, launched)
    failed = [
        cell
        for number, cell in enumerate(cells, start=1)
        if not run_cell(of[cell], cell, f"{number} of {len(cells)}", launched)
    ]
    results = {cell: _row(cell, args) for cell in cells if cell not in failed}
    spent = spent_together(cells)
    if args.json:
        print(json.dumps({"rows": list(results.values()), "together": spent}))
    else:
        chosen = best(results, args.best) if args.best and results else ""
        print("\n".join(line for line in (table(results), chosen, spent) if line))
    for cell in failed:
        print(f"failed: {cell.label} seed={cell.seed}; {why_it_failed(cell)}", file=sys.stderr)
    return 1 if failed else 0


def _row(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """Return the result of a run with what else is asked for, or known."""
    row = result(cell)
    if args.zero_shot:
        row["zero_shot"] = zero_shot(cell)
    if args.logs:
        row["logs"] = logs(cell)
    if MODEL in cell.settings:
        with suppress(DataError):  # its configuration is not here any more
            row["size"] = model_size(cell.settings[MODEL])
    return row


def _select(
    args: argparse.Namespace, recipes: dict[str, Any], cells: list[Cell], launched: list[str]
) -> int:
    """Search privately and print the best run. Raises: ConfigError."""
    from hf_dp.cli.private_selection import Search, select

    for option in ("zero_shot", "json", "best"):
        if getattr(args, option):
            raise ConfigError(
                f"`--{option.replace('_', '-')}` shows all runs, and a private selection releases "
                "one. Leave it out."
            )
    if not args.score or len(recipes) > 1:
        raise ConfigError(
            "`--private-selection` needs the metric that decides (--score accuracy, for example) "
            f"and one recipe in `--config`, since several differ in cost; got {args.score} and "
            f"{sorted(recipes)}."
        )
    (recipe,) = recipes.values()
    found = select(Search(recipe, cells, args.private_selection, args.score), launched)
    print(found.in_words())
    return 0


def _refuse_privacy_arguments(fixed: dict[str, Any], cells: Sequence[Cell]) -> None:
    """Raise ConfigError for privacy arguments of a sweep in which no run is private."""
    modes = {cell.settings.get("privacy_mode", fixed.get("privacy_mode")) for cell in cells}
    if modes != {NON_PRIVATE}:
        return
    given = [key for key in {**fixed, **cells[0].settings} if key in private_keys()]
    if given:
        raise ConfigError(
            f"Expected no privacy arguments beside privacy_mode={NON_PRIVATE}, got {given}. Remove "
            "them; those of the recipe are left out by themselves."
        )
