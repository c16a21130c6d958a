"""``hf-dp sweep``: train over a grid of settings and seeds, and report what the runs cost together.

An interrupted sweep is resumed by the same command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_dp.cli.cell_runs import (
    AS_BASELINE,
    result,
    run_cell,
    why_it_failed,
    with_settings,
    zero_shot,
)
from hf_dp.cli.cells import RECIPE, Cell
from hf_dp.cli.grid import grid, read_recipes, setting
from hf_dp.cli.launch import add_launch_options, launch_words, refuse_several
from hf_dp.cli.non_private import NON_PRIVATE, private_keys
from hf_dp.cli.options import Parser
from hf_dp.cli.settings_figure import plot_sweep
from hf_dp.cli.sweep_figures import (
    MODEL,
    metric_of,
    plot_against,
    plot_log,
    plot_over_zero_shot,
)
from hf_dp.cli.sweep_report import TIMES_NOTE, best, spent_together, table
from hf_dp.errors import ConfigError, DataError

EXAMPLES = """examples:
  hf-dp sweep --config recipes/sst2/minilm_dp_adam_eps3.yaml --seeds 0 1 2 \\
      --grid target_epsilon=3,8 learning_rate=5e-4,1e-3 --output-dir outputs/sweep
  hf-dp sweep --config recipe.yaml --grid infilling=null,sst2 target_epsilon=3,8 \\
      --output-dir outputs/words --plot words.png
  hf-dp sweep --config recipe.yaml --grid privacy_mode=dp_sgd,non_private target_epsilon=3,8 \\
      --output-dir outputs/beside
  hf-dp sweep --config full.yaml lora.yaml frost.yaml --grid target_epsilon=0.5,2,8 \\
      --seeds 0 1 2 --output-dir outputs/methods --plot methods.png
  hf-dp sweep --config recipe.yaml --grid model_name_or_path=distilgpt2,gpt2 target_epsilon=3,8 \\
      --output-dir outputs/sizes --plot sizes.png --plot-against parameters
  hf-dp sweep --config recipe.yaml --grid expected_batch_size=64,256,1024 \\
      --set logging_steps=1 --output-dir outputs/ratio --plot ratio.png --plot-log signal_to_noise
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
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
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
        "--plot",
        metavar="PATH",
        help="write a PNG, PDF or SVG: curves, a heat map or bars; with --zero-shot, trained over "
        "untrained accuracy",
    )
    add(
        "--plot-beside",
        metavar="CSV",
        help="with --plot: points to show beside those of the runs, such as a paper's; the columns "
        "are label, what is on the horizontal axis (nothing for bars; parameters in millions), and "
        "the metric; for a heat map, its two settings and the metric",
    )
    add(
        "--plot-against",
        metavar="NAME",
        help="with --plot: what is on the horizontal axis instead of a setting: parameters (of the "
        "models of the grid, without embeddings) or a metric, such as signal_to_noise",
    )
    add(
        "--plot-metric",
        metavar="NAME",
        help="with --plot: the metric that is shown (default: the first score by its name)",
    )
    add(
        "--plot-log",
        metavar="NAME",
        help="with --plot: a log of the runs over their steps, such as signal_to_noise",
    )
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
    if args.plot is not None:
        from hf_dp._plotting import require_matplotlib

        require_matplotlib(args.plot)
    _check_figure(args)
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
        for number, cell in enumerate(cells)
        if not run_cell(of[cell], cell, f"{number + 1} of {len(cells)}", launched)
    ]
    results = {cell: result(cell) for cell in cells if cell not in failed}
    if args.zero_shot:
        for cell, found in results.items():
            found["zero_shot"] = zero_shot(cell)
    _add_sizes(results)
    print(table(results))
    if args.best and results:
        print(best(results, args.best))
    if spent := spent_together(cells):
        print(spent)
    if any(found["times"] for found in results.values()):
        print(TIMES_NOTE)
    if args.plot is not None and results:
        _plot(args, results)
    for cell in failed:
        print(f"failed: {cell.label} seed={cell.seed}; {why_it_failed(cell)}", file=sys.stderr)
    return 1 if failed else 0


def _add_sizes(results: dict[Cell, dict[str, Any]]) -> None:
    """Note how large the models of a grid over models are, where that is known."""
    models = [cell for cell in results if MODEL in cell.settings]
    if not models:
        return
    from hf_dp.cli.model_size import model_size

    for cell in models:
        with suppress(DataError):
            results[cell]["size"] = model_size(cell.settings[MODEL])


def _check_figure(args: argparse.Namespace) -> None:
    """Raise ConfigError for a figure that is not drawn, or for two figures in one file."""
    kinds = {
        "--plot-against": args.plot_against is not None,
        "--plot-log": args.plot_log is not None,
        "--zero-shot": args.zero_shot,
    }
    asked = [name for name, is_asked in kinds.items() if is_asked]
    if len(asked) > 1:
        raise ConfigError(f"`{asked[0]}` and `{asked[1]}` draw different figures. Leave one out.")
    drawn_without = [name for name in asked if name != "--plot-against"]
    if args.plot_metric is not None and (args.plot is None or drawn_without):
        what = f"`{drawn_without[0]}` draws without it" if drawn_without else "Add --plot PATH"
        raise ConfigError(f"`--plot-metric` names what a figure shows. {what}, or leave it out.")
    if args.plot_beside is not None and args.plot is None:
        raise ConfigError("`--plot-beside` adds points to a figure. Add --plot PATH.")
    if args.plot_beside is not None and drawn_without:
        raise ConfigError(
            "`--plot-beside` adds points over settings, or with --plot-against. Leave "
            f"`{drawn_without[0]}` out."
        )
    if args.plot_beside is not None and not Path(args.plot_beside).is_file():
        raise ConfigError(f"Expected `--plot-beside` to be a CSV file, got {args.plot_beside!r}.")
    if args.plot is None and asked and asked != ["--zero-shot"]:
        raise ConfigError(f"`{asked[0]}` says what to draw. Add --plot PATH.")


def _plot(args: argparse.Namespace, results: dict[Cell, dict[str, Any]]) -> None:
    if args.plot_log is not None:
        plot_log(results, args.plot_log, args.plot)
    elif args.zero_shot:
        plot_over_zero_shot(results, args.plot)
    elif args.plot_against is not None:
        metric = metric_of(results, args.plot_metric)
        plot_against(results, metric, args.plot_against, args.plot, args.plot_beside)
    else:
        plot_sweep(results, metric_of(results, args.plot_metric), args.plot, args.plot_beside)


def _select(
    args: argparse.Namespace,
    recipes: dict[str, dict[str, Any]],
    cells: Sequence[Cell],
    launched: Sequence[str],
) -> int:
    """Search privately and print the best run. Raises: ConfigError."""
    from hf_dp.cli.private_selection import Search, select

    for option in ("zero_shot", "plot", "best"):
        if getattr(args, option):
            raise ConfigError(
                f"`--{option.replace('_', '-')}` shows all runs, and a private selection releases "
                "one. Leave it out."
            )
    if not args.score:
        raise ConfigError(
            "`--private-selection` needs the metric that decides. Add --score accuracy, for "
            "example."
        )
    if len(recipes) > 1:
        raise ConfigError(
            "Expected one recipe in `--config` with `--private-selection`, got "
            f"{sorted(recipes)}: what several cost differs. Search in one."
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
