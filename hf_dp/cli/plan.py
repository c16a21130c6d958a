"""``hf-dp plan``: estimate what a run, or a recipe, will cost before anything is spent."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_dp import accounting
from hf_dp._arguments import argument, own_fields
from hf_dp.cli.account import json_row
from hf_dp.cli.config import PLANNED
from hf_dp.cli.options import Parser, add_fields, aligned, taken
from hf_dp.cli.recipes import (
    PlannedArguments,
    refuse_other_modes,
    rows_of,
    shards_of,
    trained_numbers,
    tuner_of,
)
from hf_dp.cli.tasks import read_recipe
from hf_dp.errors import ConfigError, HfDpError
from hf_dp.plans.dp_fp import DP_FP
from hf_dp.plans.units import SAMPLINGS
from hf_dp.trainer.privacy_arguments import plan_of
from hf_dp.trainer.row_arguments import users_of
from hf_dp.trainer.weighing import Weighed

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
        "For DP-FP that protects labels: the number of classes. Unset means that of the recipe's "
        "class_names.",
    )
    parameters: int | None = argument(
        None,
        "Number of trainable parameters, to compare signal and noise. Unset means the recipe's, "
        "if its model is available.",
    )
    cross_check: bool = argument(False, "Show epsilon by every accountant, with its kind.")
    sweep: list[str] = argument(
        [],
        "KEY=VALUES: a table over one option, or all combinations of several: "
        "expected_batch_size=64..4096 (doubling), num_train_epochs=1,3,10.",
    )
    json: bool = argument(False, "One JSON object on stdout, which hf-dp figure draws.")


@dataclass(frozen=True)
class Planned:
    """A recipe with the options that replace its values, and what is known beside them."""

    recipe: dict[str, Any]
    options: PlanOptions

    def forecast(self, plan: PrivacyPlan) -> Forecast:
        """Forecast the cost of a plan."""
        from hf_dp.planning import forecast

        names = accounting.ACCOUNTANTS if self.options.cross_check else None
        return forecast(plan, names, parameters=self.options.parameters)

    def plan(
        self, changes: Mapping[str, Any], watch: Callable[[list[Weighed]], object] | None = None
    ) -> tuple[PrivacyPlan, UnitTable | None]:
        """Return the plan that a trainer would make with some arguments changed, and whose its rows
        are; ``watch`` as :func:`plan_of` has it."""
        changes = dict(changes)
        num_examples = changes.pop("num_examples", self.options.num_examples)
        values = replaced(self.recipe, changes)
        args = PlannedArguments.of(values)
        num_examples, units = rows_of(values, num_examples, users_of(args))
        classes = self.options.num_classes or len(values.get("class_names") or []) or None
        if classes is None and args.labels_in_vector:
            raise ConfigError(
                "Labels are protected, but the recipe does not say how many classes there are. "
                "Add --num_classes K."
            )
        plan = plan_of(args, num_examples, tuner_of(values), classes, units, watch)
        if (shards := shards_of(values)) is not None:
            from hf_dp.streams.reading import check_sampler, check_steps

            check_sampler(plan.sampler(), shards)
            check_steps(plan.steps, shards)
        return plan, units


def replaced(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with some changed; one of a pair of which either decides takes the other's
    place."""
    gone = {name for pair in _PAIRS for name in pair if changes.keys() & set(pair)}
    return {key: value for key, value in values.items() if key not in gone} | dict(changes)


def main(argv: Sequence[str]) -> int:
    """Print the plan; return 2 (with a line on stderr) for what cannot be planned."""
    parser = Parser(
        "hf-dp plan",
        usage="hf-dp plan [--config FILE] [--NAME VALUE ...]",
        description="Estimate what a private run will cost: noise, epsilon, signal to noise. "
        "Nothing is run. Beside the options below, it takes those of `hf-dp train`.",
        epilog=EXAMPLES,
    )
    parser.option("--config", "a recipe; options given here replace its values", "FILE")
    for group in (PlanOptions, *PLANNED):
        add_fields(parser, group)
    given, recipe, _ = read_recipe(parser, argv)
    options = taken(PlanOptions, given)
    own = {field.name for group in PLANNED for field in own_fields(group)}
    recipe = replaced(recipe, {key: value for key, value in vars(given).items() if key in own})
    mode = recipe.get("privacy_mode", "dp_sgd")
    refuse_other_modes(mode, "hf-dp plan", ("dp_sgd", DP_FP))
    if mode == DP_FP and options.parameters is not None:
        raise ConfigError(
            "`--parameters` is for privacy_mode dp_sgd, where a step releases one noisy sum. Leave "
            "it out for DP-FP."
        )
    planned = Planned(recipe, options)
    if options.sweep:
        return _sweep(planned)
    if options.parameters is None and mode != DP_FP and "model_name_or_path" in recipe:
        with suppress(HfDpError):  # `--parameters` says it then
            options.parameters = trained_numbers(recipe, recipe.get("peft"))
    in_bands: list[Weighed] = []
    plan, units = planned.plan({}, in_bands.extend)
    found = planned.forecast(plan)
    if options.json:
        report = _json(found)
        if in_bands:
            report["bands"] = [{**vars(one), "plan": one.plan.to_dict()} for one in in_bands]
        print(json.dumps(report, allow_nan=False))
        return 0
    print(found)
    if in_bands:
        print(of_bands(in_bands, options.parameters))
    if units is not None and plan.users is not None:
        print(of_users(units, plan, lambda changes: planned.plan(changes)[0]))
    return 0


def _sweep(planned: Planned) -> int:
    """Print a table over arguments that are numbers."""
    from hf_dp.planning import parse_sweep

    known = {"num_examples", *(field.name for group in PLANNED for field in own_fields(group))}
    words = planned.options.sweep
    axes = dict(parse_sweep(word, known) for word in words)
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
    else:
        print(table_of(swept, rows))
    return 0


def _json(found: Forecast) -> dict[str, object]:
    return {
        "plan": found.plan.to_dict(),
        "epochs": found.epochs,
        "effective_noise_multiplier": found.effective_noise_multiplier,
        "most_signal": found.most_signal,
        "examples": found.examples,
        "results": [json_row(answer) for answer in found.answers],
    }


# -- to read ---


def of_bands(in_bands: Sequence[Weighed], parameters: int | None) -> str:
    """Return a line to read for each number of bands."""
    lines = []
    for one in in_bands:
        memory = f"{one.bands - 1} x 8 bytes a number"
        if parameters is not None:
            memory = f"{(one.bands - 1) * 8 * parameters / 2**20:,.0f} MiB"
        name = "independent" if one.bands == 1 else f"{one.bands} bands"
        ratios = (f"{n:.3f}" for n in (one.weights, one.sums, one.step, one.resumed))
        lines.append([name, f"{one.plan.noise_multiplier:.5g}", *ratios, memory])
    columns = ["noise", "multiplier", "weights", "sums", "a step", "resumed", "memory"]
    return (
        "\nNoise, in units of independent noise of the same epsilon: in the weights at the end, by "
        "schedule and\nmomentum; in the sums of the first 1, 2, ... steps; in a step (which Adam "
        "divides by, so search\nfor the learning rate again); in the weights, if resumed once:"
        f"\n\n{aligned(columns, lines)}"
    )


def of_users(
    units: UnitTable, plan: PrivacyPlan, plan_with: Callable[[Mapping[str, object]], PrivacyPlan]
) -> str:
    """Say how many rows users have, for this console alone, and compare drawing users with drawing
    their rows, at the same epsilon, steps and rows a step."""
    users, target = plan.users, plan.target_epsilon
    assert users is not None
    sizes = sorted(units.sizes().tolist())
    used, more = len(units.capped(users.max_rows)), sum(size > users.max_rows for size in sizes)
    lines = [
        f"\n{units.num_rows:,} rows of {len(sizes):,} users: {sizes[0]} to {sizes[-1]} each, "
        f"median {sizes[len(sizes) // 2]}; {more:,} users have more than max_rows_per_unit "
        f"({users.max_rows}), and {used / units.num_rows:.0%} of the rows take part in an epoch. "
        "These numbers are not private: do not publish them."
    ]
    if target is None:
        return "\n".join([*lines, "Give a target_epsilon to compare users with rows as draws."])
    rows_of_one = used / len(units)
    rows = plan.expected_batch_size * (1 if users.by_row else rows_of_one)
    lines.append(
        f"\nNoise on the mean gradient of a step of about {rows:,.0f} rows, in clipping norms, at "
        f"epsilon {target:g}:"
    )
    for sampling in SAMPLINGS:
        by_row = dataclasses.replace(users, sampling=sampling, num_rows=None).by_row
        drawn = round(rows if by_row else rows / rows_of_one)
        changes: dict[str, object] = {"expected_batch_size": drawn, "max_steps": plan.steps}
        changes["unit_sampling"] = sampling
        changes["unit_reduction"] = None if by_row else users.reduction
        try:
            said = f"{plan_with(changes).noise_multiplier / drawn:.4g}"
        except HfDpError as problem:
            said = f"not possible ({problem})"
        chosen = " (as configured)" if sampling == users.sampling else ""
        lines.append(f"  unit_sampling={sampling}{chosen}: {said}")
    lines.append(
        "The smaller noise is better if a user's mean gradient is about as long as a row's. It is "
        "shorter where the rows of a user differ much."
    )
    return "\n".join(lines)


def table_of(swept: Sequence[Mapping[str, float]], rows: Sequence[Forecast]) -> str:
    """Return a line for each combination of the swept arguments."""
    from hf_dp.planning import NO_GUARANTEE

    lines = []
    for values, row in zip(swept, rows, strict=True):
        plan = row.plan
        cells = {name: f"{value:g}" for name, value in values.items()}
        cells |= {"steps": str(plan.steps), "sample rate": f"{plan.sample_rate:.6g}"}
        for event in plan.events():  # that of the steps is the last
            for part, sigma in event.noise_multipliers.items():
                cells[f"noise of {part}"] = f"{sigma:.6g}"
        if any(each.effective_noise_multiplier is not None for each in rows):
            effective = row.effective_noise_multiplier
            cells["effective"] = "-" if effective is None else f"{effective:.5g}"
        for answer in row.answers if plan.mechanism.established else ():
            found = answer.epsilon
            cells[answer.accountant] = "-" if found is None else f"{found.rounded_up(3):.3f}"
        if not plan.mechanism.established:
            figure = accounting.epsilon(plan.event(), plan.delta, "gdp_clt").value
            cells["paper's figure"] = f"{figure:.3f}"
        lines.append(cells)
    first = rows[0]
    footnote = "; effective: / sample rate" * ("effective" in lines[0])
    end = f"epsilon by {', '.join(answer.accountant for answer in first.answers)}"
    if not first.plan.mechanism.established:
        end = f"{first.plan.words.name}: {NO_GUARANTEE}."
    shown = aligned(list(lines[0]), [list(cells.values()) for cells in lines])
    return f"{shown}\nnoise: noise multiplier{footnote}; {end}"
