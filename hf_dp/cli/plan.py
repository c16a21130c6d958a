"""``hf-dp plan``: estimate what a run, or a recipe, will cost before anything is spent."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hf_dp.cli import plan_forward
from hf_dp.cli.account import ACCOUNTANTS
from hf_dp.cli.answers import json_row, table
from hf_dp.cli.config import check_recipe, read_yaml
from hf_dp.cli.options import Parser, hyphenated
from hf_dp.cli.plan_settings import plan_of, refuse_other_modes, settings_of, with_rows
from hf_dp.errors import ConfigError, HfDpError
from hf_dp.plans.dp_fp import DP_FP, VARIANTS
from hf_dp.plans.sampling import POISSON, SAMPLINGS

if TYPE_CHECKING:
    from hf_dp.batches.units import UnitTable
    from hf_dp.planning import Forecast, Transfer
    from hf_dp.plans import NoisedLossPlan
    from hf_dp.plans.privacy import PrivacyPlan
    from hf_dp.plans.units import Users

EXAMPLES = """examples (SST-2):
  hf-dp plan --num-examples 67349 --batch-size 1024 --epochs 3 --target-epsilon 3 --cross-check
  hf-dp plan --num-examples 67349 --epochs 3 --target-epsilon 3 --sweep batch_size=64..4096
  hf-dp plan --num-examples 67349 --target-epsilon 3 --sweep steps=16,256 batch_size=64..4096 \\
      --json > plan.json
  hf-dp figure plan.json --x sample_rate --y effective_noise_multiplier --by steps -o plan.png
  hf-dp plan --num-examples 67349 --batch-size 1024 --epochs 3 --target-epsilon 3 \\
      --transfer-to 392702
  hf-dp plan --config recipes/dp_fp/sst2/roberta_base.yaml --num-examples 67349
"""

_SWEPT = {
    "num_examples": int,
    "batch_size": int,
    "epochs": float,
    "steps": int,
    "target_epsilon": float,
    "noise_multiplier": float,
    "delta": float,
    "clipping_norm": float,
}
_PAIRS = (("epochs", "steps"), ("target_epsilon", "noise_multiplier"))  # one replaces the other


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = Parser(
        "hf-dp plan",
        description="Estimate what a private run will cost: noise, epsilon, signal beside noise, "
        "time. Nothing is run.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_run(parser.add_argument_group("the run").add_argument)
    _add_facts(parser.add_argument_group("known facts, for more estimates").add_argument)
    _add_output(parser.add_argument_group("output").add_argument)
    return parser


def _add_run(add: Callable[..., Any]) -> None:
    add("--config", metavar="FILE", help="a recipe; options given here replace its values")
    add(
        "--num-examples",
        type=int,
        metavar="N",
        help="rows of the training set, or its users with privacy_unit: user (default: those of "
        "the recipe's data)",
    )
    add("--batch-size", type=int, metavar="B", help="expected logical batch; sample rate = B / N")
    add(
        "--max-batch-size",
        type=int,
        metavar="B",
        help="largest number of sampled examples that a step uses (default: no limit)",
    )
    add("--epochs", type=float, metavar="E", help="steps = E N / B, rounded up (default: 3)")
    add("--steps", type=int, metavar="T", help="number of optimizer steps, instead of epochs")
    add("--target-epsilon", type=float, metavar="EPSILON", help="calibrate the noise to it")
    add(
        "--noise-multiplier",
        type=float,
        metavar="SIGMA",
        help="noise standard deviation / clipping norm, instead",
    )
    add("--delta", type=float, help="default: 1 / (2 N)")
    add(
        "--mean-runs",
        type=float,
        metavar="K",
        help="expected runs of a private selection (hf-dp sweep), whose epsilon is that of all",
    )
    add("--sampling", choices=SAMPLINGS, help="which examples join a step (default: poisson)")
    add("--accountant", choices=ACCOUNTANTS, help="whose epsilon counts (default: pld)")
    add(
        "--clipping-norm",
        type=float,
        metavar="C",
        help="largest L2 norm of one example's gradient (default: 0.1)",
    )
    add(
        "--dp-fp-variant",
        choices=VARIANTS,
        help="for a recipe of DP-FP: plan this variant instead of the recipe's",
    )
    add(
        "--num-classes",
        type=int,
        metavar="K",
        help="for a recipe of DP-FP that protects labels (default: the recipe's class_names)",
    )
    add(
        "--noised-loss-budget-ratio",
        type=float,
        metavar="R",
        help="share of the privacy budget for a noised training loss (default: none is released)",
    )
    add(
        "--noised-loss-bound",
        type=float,
        metavar="B",
        help="with it: largest loss of one example",
    )


def _add_facts(add: Callable[..., Any]) -> None:
    add(
        "--gradient-norm",
        type=float,
        metavar="G",
        help="norm of the mean clipped gradient, for the signal beside noise",
    )
    add(
        "--parameters",
        type=int,
        metavar="P",
        help="trainable parameters, for memory and the signal beside noise (default: the recipe's, "
        "where its model is here)",
    )
    add(
        "--throughput",
        type=float,
        metavar="X",
        help="examples per second (hf-dp bench throughput), for the time",
    )


def _add_output(add: Callable[..., Any]) -> None:
    add("--cross-check", action="store_true", help="epsilon by every accountant, with its kind")
    add(
        "--sweep",
        nargs="+",
        metavar="KEY=VALUES",
        help="a table over one option, or all combinations of several: batch_size=64..4096 "
        "(doubling), epochs=1,3,10",
    )
    add(
        "--transfer-to",
        type=int,
        metavar="N",
        help="settings with the same sample rate and steps for N examples",
    )
    add("--json", action="store_true", help="one JSON object on stdout, which hf-dp figure draws")


def main(argv: Sequence[str]) -> int:
    """Print the plan; return 2 (with a line on stderr) for what cannot be planned."""
    args = build_parser().parse_args(hyphenated(argv))
    recipe = {} if args.config is None else read_yaml(args.config)
    check_recipe(recipe)
    mode = recipe.get("privacy_mode", "dp_sgd")
    refuse_other_modes(mode, "hf-dp plan", ("dp_sgd", DP_FP))
    if mode == DP_FP:
        _refuse_for_sums(args)
    settings = settings_of(args, recipe)
    if args.sweep is not None:
        return _sweep(args, settings)
    if args.parameters is None and mode != DP_FP:
        args.parameters = _trained_numbers(recipe)
    found = _forecast(args, settings)
    to = None if args.transfer_to is None else _transfer(found.plan, args.transfer_to)
    if args.json:
        transferred = None if to is None else dataclasses.asdict(to)
        print(json.dumps({**_json(found), "transfer": transferred}, allow_nan=False))
        return 0
    print(plan_forward.text(found) if mode == DP_FP else _text(found))
    from hf_dp.run.outlook import drowned

    for doubt in () if found.most_signal is None else drowned(found.plan, args.parameters):
        print(f"\n{doubt}")
    if "table" in settings:
        print(_rows_of_users(settings["table"], settings["users"]))
        print(_both_ways(settings, found.plan))
    if to is not None:
        print(
            f"\nfor {to.num_examples:,} examples, same sample rate and steps: expected batch size "
            f"{to.expected_batch_size}, epochs {to.num_train_epochs:.10g} ({to.steps} steps)"
        )
    return 0


def _trained_numbers(recipe: dict[str, Any]) -> int | None:
    """Return how many numbers a recipe trains, where its model's configuration is here."""
    if "model_name_or_path" not in recipe:
        return None
    from hf_dp.cli.suggest import trained_numbers

    try:
        return trained_numbers(recipe, recipe.get("peft"))
    except HfDpError:  # `--parameters` says it then
        return None


def _refuse_for_sums(args: argparse.Namespace) -> None:
    """Raise ConfigError for what is only defined where each step releases one noisy sum."""
    for option in ("transfer_to", "gradient_norm", "parameters"):
        if getattr(args, option) is not None:
            raise ConfigError(
                f"`--{option.replace('_', '-')}` is for privacy_mode dp_sgd, where a step releases "
                "one noisy sum. Leave it out for DP-FP."
            )


def _transfer(plan: PrivacyPlan, num_examples: int) -> Transfer:
    """Return the settings for another number of examples. Raises: ConfigError for a cut sample."""
    from hf_dp.planning import transfer

    if plan.max_batch_size is not None:
        raise ConfigError(
            "A limit on the sample (--max-batch-size) does not carry over to other data. Transfer "
            "without it."
        )
    return transfer(sample_rate=plan.sample_rate, steps=plan.steps, num_examples=num_examples)


def _forecast(args: argparse.Namespace, settings: dict[str, Any]) -> Forecast:
    from hf_dp.planning import forecast

    plan = plan_of(settings)
    return forecast(
        plan,
        ACCOUNTANTS if args.cross_check else None,
        gradient_norm=args.gradient_norm,
        parameters=args.parameters,
        throughput=args.throughput,
    )


def _sweep(args: argparse.Namespace, settings: dict[str, Any]) -> int:
    from hf_dp.planning import parse_sweep

    axes = dict(parse_sweep(word, _SWEPT) for word in args.sweep)
    if len(axes) < len(args.sweep) or any(axes.keys() >= set(pair) for pair in _PAIRS):
        raise ConfigError(
            f"Expected each word of `--sweep` to vary another option, got {args.sweep}. Of epochs "
            "and steps, and of target_epsilon and noise_multiplier, vary one."
        )
    swept = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    rows = []
    for values in swept:
        changed = {**settings, **values}
        for one, other in _PAIRS:
            if one in values or other in values:
                changed[other if one in values else one] = None
        rows.append(_forecast(args, changed))
    if args.json:
        found = [{"settings": one, **_json(row)} for one, row in zip(swept, rows, strict=True)]
        print(json.dumps({"rows": found}, allow_nan=False))
        return 0
    of = plan_forward.sweep_table if settings["forward"] is not None else _sweep_table
    print(of(swept, rows))
    return 0


def _sweep_table(swept: Sequence[dict[str, float]], rows: Sequence[Forecast]) -> str:
    from hf_dp.benchmarks.tables import aligned

    names = [answer.accountant for answer in rows[0].answers]
    header = [*swept[0], "sample rate", "steps", "noise", "effective", *names]
    with_signal = rows[0].signal_to_noise is not None
    lines = []
    for values, row in zip(swept, rows, strict=True):
        plan = row.plan
        cells = [
            *(f"{value:g}" for value in values.values()),
            f"{plan.sample_rate:.6g}",
            str(plan.steps),
            f"{plan.noise_multiplier:.6g}",
            f"{row.effective_noise_multiplier:.5g}",
            *(_cell(answer) for answer in row.answers),
        ]
        lines.append(
            [*cells, f"{row.signal_to_noise:.3g}"] if row.signal_to_noise is not None else cells
        )
    legend = (
        "noise: noise multiplier; effective: noise multiplier / sample rate; epsilon by "
        f"{', '.join(names)}"
    )
    return f"{aligned([*header, 'signal/noise'] if with_signal else header, lines)}\n{legend}"


def _cell(answer: Any) -> str:
    return "-" if answer.epsilon is None else f"{answer.epsilon.rounded_up(3):.3f}"


def _json(found: Forecast) -> dict[str, Any]:
    return {
        "plan": found.plan.to_dict(),
        "epochs": found.epochs,
        "effective_noise_multiplier": None
        if found.plan.mechanism.privacy_mode == DP_FP
        else found.effective_noise_multiplier,
        "signal_to_noise": found.signal_to_noise,
        "most_signal": found.most_signal,
        "examples": found.examples,
        "seconds": found.seconds,
        "state_bytes": found.state_bytes,
        "results": [json_row(answer) for answer in found.answers],
    }


def _noised_loss(plan: PrivacyPlan, mechanism: NoisedLossPlan) -> str:
    together = mechanism.step_event(plan.schedule, mechanism.sigma, 1).joint_noise_multiplier
    return (
        f"noised loss of each step: losses clipped to [0, {mechanism.noised_loss_bound:g}], noise "
        f"multiplier {mechanism.loss_noise_multiplier:.6g}, standard deviation of the mean "
        f"{mechanism.noised_loss_std(plan.schedule):.4g}; with the gradients, as one sum with "
        f"noise multiplier {together:.6g}"
    )


def _rows_of_users(table: UnitTable, users: Users) -> str:
    """Say how many rows users have; a function of the rows, for this console alone."""
    sizes = sorted(table.sizes().tolist())
    used = sum(min(size, users.max_rows) for size in sizes)
    more = sum(size > users.max_rows for size in sizes)
    return (
        f"\n{table.num_rows:,} rows of {len(sizes):,} users: {sizes[0]} to {sizes[-1]} each, "
        f"median {sizes[len(sizes) // 2]}; {more:,} users have more than max_rows_per_unit "
        f"({users.max_rows}), and {used / table.num_rows:.0%} of the rows take part in an epoch. "
        "These numbers are not private: do not publish them."
    )


def _both_ways(settings: dict[str, Any], plan: PrivacyPlan) -> str:
    """Compare drawing users with drawing their rows, at the same epsilon, steps and rows a step."""
    from hf_dp.plans.units import SAMPLINGS as OF_USERS

    users, epsilon = plan.users, plan.target_epsilon
    if users is None or epsilon is None:
        return "Give a target_epsilon to compare drawing users with drawing their rows."
    whose = settings["table"]
    rows_of_one = len(whose.capped(users.max_rows)) / len(whose)
    rows = plan.expected_batch_size * (1 if users.by_row else rows_of_one)
    lines = [
        f"\nNoise on the mean gradient of a step of about {rows:,.0f} rows, in clipping norms, at "
        f"epsilon {epsilon:g}:"
    ]
    for sampling in OF_USERS:
        other = with_rows(dataclasses.replace(users, sampling=sampling), whose)
        drawn = rows if other.by_row else rows / rows_of_one
        try:
            found = plan_of({**settings, "users": other, "batch_size": drawn, "steps": plan.steps})
            said = f"{found.noise_multiplier / drawn:.4g}"
        except HfDpError as problem:
            said = f"not possible ({problem})"
        chosen = " (as configured)" if sampling == users.sampling else ""
        lines.append(f"  unit_sampling={sampling}{chosen}: {said}")
    lines.append(
        "The smaller is the better one if a user's mean gradient is about as long as a row's. It "
        "is shorter where the rows of a user differ much."
    )
    return "\n".join(lines)


def _text(found: Forecast) -> str:
    from hf_dp.plans import NoisedLossPlan

    plan = found.plan
    drawn = "" if plan.words.sampling_code == POISSON else f", {plan.words.drawn}"
    what = "examples" if plan.users is None else "rows" if plan.users.by_row else "users"
    capped = (
        "" if plan.max_batch_size is None else f", of which at most {plan.max_batch_size} are used"
    )
    lines = [
        f"{plan.drawn_from:,} {what}, {plan.expected_batch_size:g} expected in a step{capped}: "
        f"sample rate {plan.sample_rate:.6g}{drawn}",
        f"{plan.steps:,} steps, {found.epochs:.4g} epochs, {found.examples:,.0f} {what} in all",
        f"noise multiplier {plan.noise_multiplier:.6g}, effective "
        f"{found.effective_noise_multiplier:.5g} (/ sample rate)",
    ]
    if isinstance(plan.mechanism, NoisedLossPlan):
        lines.append(_noised_loss(plan, plan.mechanism))
    if plan.selection is not None:
        lines.insert(
            2,
            f"before them at most {plan.selection.iterations} releases to select what trains, "
            f"sample rate {plan.selection.sample_rate:g}, noise multiplier "
            f"{plan.selection.noise_multiplier:.6g}",
        )
    lines.append(
        "signal beside noise: not known; give --parameters, the numbers that train"
        if found.most_signal is None
        else f"the gradients of all steps add up to at most {found.most_signal:.3g} of their noise"
    )
    if found.signal_to_noise is not None:
        lines.append(f"signal / noise of a step {found.signal_to_noise:.4g}")
    if found.seconds is not None:
        lines.append(
            f"{found.seconds / 3600:.2f} hours at that throughput, without start, evaluation and "
            "saving"
        )
    if found.state_bytes is not None:
        size = f"{found.state_bytes / 2**30:.2f} GiB"
        lines.append(
            f"{size} for weights, gradient sums and Adam's moments in float32; activations on top"
        )
    return "\n".join([*lines, "", table(found.answers, plan.delta)])
