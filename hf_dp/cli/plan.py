"""``hf-dp plan``: estimate what a run, or a recipe, will cost before anything is spent."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_dp._arguments import argument, own_fields
from hf_dp.accounting import ACCOUNTANTS
from hf_dp.cli import plan_text
from hf_dp.cli.answers import json_row
from hf_dp.cli.argument_groups import PLANNED
from hf_dp.cli.config import check_recipe, peft_config, read_yaml
from hf_dp.cli.options import Parser, add_fields, taken
from hf_dp.cli.recipes import refuse_other_modes, rows_of, trained_numbers
from hf_dp.errors import ConfigError, HfDpError
from hf_dp.plans.dp_fp import DP_FP

if TYPE_CHECKING:
    from hf_dp.batches.units import UnitTable
    from hf_dp.planning import Forecast
    from hf_dp.plans.privacy import PrivacyPlan

EXAMPLES = """examples (SST-2):
  hf-dp plan --num_examples 67349 --expected_batch_size 1024 --target_epsilon 3 --cross_check
  hf-dp plan --num_examples 67349 --target_epsilon 3 --sweep expected_batch_size=64..4096
  hf-dp plan --num_examples 67349 --target_epsilon 3 --json \\
      --sweep max_steps=16,256 expected_batch_size=64..4096 > plan.json
  hf-dp figure plan.json --x sample_rate --y effective_noise_multiplier --by max_steps -o plan.png
  hf-dp plan --num_examples 67349 --expected_batch_size 1024 --target_epsilon 3 \\
      --transfer_to 392702
  hf-dp plan --config recipes/dp_fp/sst2/roberta_base.yaml --num_examples 67349
"""
# One of a pair replaces the other, wherever that was said.
_PAIRS = (("num_train_epochs", "max_steps"), ("target_epsilon", "noise_multiplier"))


@dataclass
class PlanOptions:
    """What is planned, and known facts for more estimates."""

    num_examples: int | None = argument(
        None,
        "Rows of the training set, or its users with privacy_unit user. Unset means those of the "
        "recipe's data.",
    )
    num_classes: int | None = argument(
        None,
        "For DP-FP that protects labels: among how many classes. Unset means the recipe's "
        "class_names.",
    )
    gradient_norm: float | None = argument(
        None, "Norm of the mean clipped gradient, for the signal beside noise."
    )
    parameters: int | None = argument(
        None,
        "Trainable parameters, for memory and the signal beside noise. Unset means the recipe's, "
        "where its model is here.",
    )
    throughput: float | None = argument(
        None, "Examples per second (hf-dp bench throughput), for the time."
    )
    cross_check: bool = argument(False, "Show epsilon by every accountant, with its kind.")
    sweep: list[str] = argument(
        [],
        "KEY=VALUES: a table over one option, or all combinations of several: "
        "expected_batch_size=64..4096 (doubling), num_train_epochs=1,3,10.",
    )
    transfer_to: int | None = argument(
        None, "Also settings with the same sample rate and steps for this number of examples."
    )
    json: bool = argument(False, "One JSON object on stdout, which hf-dp figure draws.")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = Parser(
        "hf-dp plan",
        usage="hf-dp plan [--config FILE] [--NAME VALUE ...]",
        description="Estimate what a private run will cost: noise, epsilon, signal beside noise, "
        "time. Nothing is run.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="a recipe; options given here replace its values"
    )
    for group in (PlanOptions, *PLANNED):
        add_fields(parser, group)
    return parser


@dataclass(frozen=True)
class Planned:
    """A recipe with the options that replace its values, and what is known beside them."""

    recipe: dict[str, Any]
    options: PlanOptions

    def forecast(self, plan: PrivacyPlan) -> Forecast:
        """Forecast the cost of a plan. Raises: InvalidArgumentError."""
        from hf_dp.planning import forecast

        options = self.options
        return forecast(
            plan,
            ACCOUNTANTS if options.cross_check else None,
            gradient_norm=options.gradient_norm,
            parameters=options.parameters,
            throughput=options.throughput,
        )

    def plan(self, changes: Mapping[str, Any]) -> tuple[PrivacyPlan, UnitTable | None]:
        """Return the plan that a trainer would make with some arguments changed, and whose its rows
        are.

        Raises: ConfigError, DataError, InvalidArgumentError.
        """
        from hf_dp.trainer.arguments import PlannedArguments
        from hf_dp.trainer.from_arguments import plan_of
        from hf_dp.trainer.row_arguments import users_of
        from hf_dp.tuners.base import Tuner
        from hf_dp.tuners.methods import tuner_for

        changes = dict(changes)
        num_examples = changes.pop("num_examples", self.options.num_examples)
        values = replaced(self.recipe, changes)
        fields = PlannedArguments.__dataclass_fields__
        args = PlannedArguments(**{key: value for key, value in values.items() if key in fields})
        num_examples, units = rows_of(values, num_examples, users_of(args))
        classes = self.options.num_classes or len(values.get("class_names") or []) or None
        if classes is None and (args.labels_in_vector or args.label_epsilon is not None):
            raise ConfigError(
                "Labels are protected, and the recipe does not say among how many classes. Add "
                "--num_classes K."
            )
        tuner = tuner_for(peft_config(values.get("peft")), is_private=True) or Tuner()
        return plan_of(args, num_examples, tuner, classes, units), units


def replaced(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with some changed; one of a pair of which either decides takes the other's
    place."""
    kept = dict(values)
    for one, other in _PAIRS:
        if one in changes or other in changes:
            kept.pop(one, None), kept.pop(other, None)
    return {**kept, **changes}


def main(argv: Sequence[str]) -> int:
    """Print the plan; return 2 (with a line on stderr) for what cannot be planned."""
    given = build_parser().parse_args(list(argv))
    options = taken(PlanOptions, given)
    recipe = {} if given.config is None else read_yaml(given.config)
    check_recipe(recipe)
    own = {field.name for group in PLANNED for field in own_fields(group)}
    recipe = replaced(recipe, {key: value for key, value in vars(given).items() if key in own})
    mode = recipe.get("privacy_mode", "dp_sgd")
    refuse_other_modes(mode, "hf-dp plan", ("dp_sgd", DP_FP))
    if mode == DP_FP:
        _refuse_for_sums(options)
    planned = Planned(recipe, options)
    if options.sweep:
        return _sweep(planned)
    if options.parameters is None and mode != DP_FP and "model_name_or_path" in recipe:
        try:
            options.parameters = trained_numbers(recipe, recipe.get("peft"))
        except HfDpError:  # `--parameters` says it then
            pass
    plan, units = planned.plan({})
    found = planned.forecast(plan)
    to = None if options.transfer_to is None else _transfer(found.plan, options.transfer_to)
    if options.json:
        transferred = None if to is None else dataclasses.asdict(to)
        print(json.dumps({**_json(found), "transfer": transferred}, allow_nan=False))
        return 0
    print(plan_text.forward(found) if mode == DP_FP else plan_text.sums(found))
    for remark in _remarks(planned, found, units):
        print(remark)
    if to is not None:
        print(
            f"\nfor {to.num_examples:,} examples, same sample rate and steps: expected batch size "
            f"{to.expected_batch_size}, epochs {to.num_train_epochs:.10g} ({to.steps} steps)"
        )
    return 0


def _remarks(planned: Planned, found: Forecast, units: UnitTable | None) -> Iterator[str]:
    """Yield what is doubtful, and how drawing users compares with drawing their rows."""
    from hf_dp.run.outlook import drowned

    if found.most_signal is not None and planned.options.parameters is not None:
        for doubt in drowned(found.plan, planned.options.parameters):
            yield f"\n{doubt}"
    if units is not None and found.plan.users is not None:
        yield plan_text.rows_of_users(units, found.plan.users)
        yield plan_text.both_ways(units, found.plan, lambda changes: planned.plan(changes)[0])


def _refuse_for_sums(options: PlanOptions) -> None:
    """Raise ConfigError for what is only defined where each step releases one noisy sum."""
    for option in ("transfer_to", "gradient_norm", "parameters"):
        if getattr(options, option) is not None:
            raise ConfigError(
                f"`--{option}` is for privacy_mode dp_sgd, where a step releases one noisy sum. "
                "Leave it out for DP-FP."
            )


def _transfer(plan: PrivacyPlan, num_examples: int) -> Any:
    """Return the settings for another number of examples. Raises: ConfigError for a cut sample."""
    from hf_dp.planning import transfer

    if plan.mechanism.draw.moved > 1:
        raise ConfigError(
            "A limit on the sample (--max_logical_batch_size) does not carry over to other data. "
            "Transfer without it."
        )
    return transfer(sample_rate=plan.sample_rate, steps=plan.steps, num_examples=num_examples)


def _swept() -> dict[str, type]:
    """Return the arguments that a table can vary: all numbers, by name."""
    found: dict[str, type] = {"num_examples": int}
    for group in PLANNED:
        hints = typing.get_type_hints(group)
        for field in own_fields(group):
            for kind in typing.get_args(hints[field.name]) or (hints[field.name],):
                if kind in (int, float):
                    found[field.name] = kind
    return found


def _sweep(planned: Planned) -> int:
    from hf_dp.planning import parse_sweep

    words = planned.options.sweep
    axes = dict(parse_sweep(word, _swept()) for word in words)
    if len(axes) < len(words) or any(axes.keys() >= set(pair) for pair in _PAIRS):
        raise ConfigError(
            f"Expected each word of `--sweep` to vary another option, got {words}. Of "
            "num_train_epochs and max_steps, and of target_epsilon and noise_multiplier, vary one."
        )
    swept = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    rows = [planned.forecast(planned.plan(values)[0]) for values in swept]
    if planned.options.json:
        found = [{"settings": one, **_json(row)} for one, row in zip(swept, rows, strict=True)]
        print(json.dumps({"rows": found}, allow_nan=False))
        return 0
    print(plan_text.table_of(swept, rows))
    return 0


def _json(found: Forecast) -> dict[str, Any]:
    forward = found.plan.mechanism.privacy_mode == DP_FP
    return {
        "plan": found.plan.to_dict(),
        "epochs": found.epochs,
        "effective_noise_multiplier": None if forward else found.effective_noise_multiplier,
        "signal_to_noise": found.signal_to_noise,
        "most_signal": found.most_signal,
        "examples": found.examples,
        "seconds": found.seconds,
        "state_bytes": found.state_bytes,
        "results": [json_row(answer) for answer in found.answers],
    }
