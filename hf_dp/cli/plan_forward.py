"""``hf-dp plan`` for recipes of DP-FP: what each variant releases, and what it costs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_dp.cli.answers import table
from hf_dp.errors import ConfigError
from hf_dp.plans.dp_fp import (
    DP_FP,
    VARIANTS,
    ForwardPlan,
    FrozenPlan,
    PrivateEncoderPlan,
    PublishedPlan,
)

if TYPE_CHECKING:
    from hf_dp.planning import Forecast
    from hf_dp.plans.privacy import PrivacyPlan

NO_GUARANTEE = (
    "DP-FP as published has NO differential privacy guarantee: no epsilon is known for it"
)


def forward_arguments(
    recipe: dict[str, Any], given: dict[str, Any], variant: str | None
) -> argparse.Namespace:
    """Return the arguments of a run as ``hf-dp train`` would check them.

    Args:
        recipe: the keys of a file whose privacy_mode is dp_fp.
        given: keys that replace them; None where a key is not given.
        variant: that replaces the recipe's, or None.

    Raises: ConfigError, InvalidArgumentError, UnsupportedArgumentError.
    """
    import dataclasses
    from functools import partial

    from hf_dp._dataclasses import default_of
    from hf_dp.trainer.argument_checks import Problems, attempt, check_noised_loss, raise_all
    from hf_dp.trainer.arguments import DPTrainingArguments
    from hf_dp.trainer.forward_arguments import forward_problems, resolve_forward

    values = {each.name: default_of(each) for each in dataclasses.fields(DPTrainingArguments)}
    values |= {name: value for name, value in recipe.items() if name in values}
    values |= {key: value for key, value in given.items() if value is not None}
    if variant is not None:
        values["dp_fp_variant"] = variant
    if values["dp_fp_variant"] is None:
        raise ConfigError(
            f"The recipe names no `dp_fp_variant`. Add --dp-fp-variant, one of {list(VARIANTS)}."
        )
    args = argparse.Namespace(**{**values, "privacy_mode": DP_FP})
    problems: Problems = {}
    check_noised_loss(args, problems)
    resolve_forward(args)
    forward_problems(args, partial(attempt, args), problems)
    raise_all(problems)
    if args.accountant is None:
        args.accountant = "gdp_clt" if args.dp_fp_variant == PublishedPlan.variant else "pld"
    return args


def mechanism_of(args: argparse.Namespace, num_classes: int | None) -> ForwardPlan:
    """Return the plan of the variant.

    Raises: ConfigError where labels are protected and the number of classes is not known.
    """
    from hf_dp.trainer.forward_arguments import forward_plan

    if (args.labels_in_vector or args.label_epsilon is not None) and num_classes is None:
        raise ConfigError(
            "Labels are protected, and the recipe does not say among how many classes. Add "
            "--num-classes K."
        )
    return forward_plan(args, num_classes)


def text(found: Forecast) -> str:
    """Return the plan of a variant, to read."""
    plan = found.plan
    mechanism = plan.mechanism
    assert isinstance(mechanism, ForwardPlan)
    epochs = plan.steps * plan.expected_batch_size / plan.num_examples
    lines = [
        f"{plan.words.name}: {plan.num_examples:,} rows, {plan.expected_batch_size:g} expected in "
        f"a step, {plan.steps:,} steps, {epochs:.4g} epochs",
        *_noise_in_words(plan, mechanism),
        f"labels: {_labels_in_words(mechanism)}",
    ]
    if plan.selection is not None:
        lines.append(
            f"before the steps at most {plan.selection.iterations} releases to select what trains, "
            f"noise multiplier {plan.selection.noise_multiplier:.6g}"
        )
    if found.seconds is not None:
        lines.append(f"{found.seconds / 3600:.2f} hours at that throughput")
    if isinstance(mechanism, PublishedPlan):
        return "\n".join([*lines, "", *_published(plan)])
    return "\n".join([*lines, "", table(found.answers, plan.delta)])


def _noise_in_words(plan: PrivacyPlan, mechanism: ForwardPlan) -> list[str]:
    std = mechanism.vector_noise_multiplier * mechanism.vector_clipping_norm
    vectors = (
        f"noise multiplier {mechanism.vector_noise_multiplier:.6g}, standard deviation {std:.6g} "
        "in each coordinate"
    )
    rate = f"sample rate {plan.sample_rate:.6g}"
    if isinstance(mechanism, PrivateEncoderPlan):
        draws = {
            "separate": "two independent draws a step, for gradients and for vectors",
            "shared": "one draw a step, for gradients and vectors",
        }
        return [
            f"gradients below: noise multiplier {plan.noise_multiplier:.6g}, {rate}",
            f"vectors: {vectors}",
            draws[mechanism.draws],
        ]
    if isinstance(mechanism, FrozenPlan) and not mechanism.releases_each_step:
        return [
            f"one vector of each row, released before the first step: {vectors}",
            "more epochs on these vectors cost nothing",
        ]
    draws_of = getattr(mechanism, "num_micro_batches", 1)
    return [
        f"vectors of the rows drawn: {vectors}",
        f"{draws_of} independent draw{'s' if draws_of > 1 else ''} a step, {rate} each",
    ]


def _labels_in_words(mechanism: ForwardPlan) -> str:
    if mechanism.labels_in_vector:
        return f"in the vector, among {mechanism.num_classes} classes; covered"
    epsilon = getattr(mechanism, "label_epsilon", None)
    if epsilon is not None:
        return f"randomized response with epsilon {epsilon:g}, which the figure below includes"
    if isinstance(mechanism, PublishedPlan):
        return "not protected"
    return "public"


def _published(plan: PrivacyPlan) -> list[str]:
    """Return the paper's figure with what it is, and what a bound says of the same noise."""
    from hf_dp.accounting import PublishedForwardNoise, epsilon
    from hf_dp.accounting.comparison import compare
    from hf_dp.planning.published_forward import assumptions

    event = plan.event()
    assert isinstance(event, PublishedForwardNoise)
    figure = epsilon(event, plan.delta, "gdp_clt").value
    rows = [f"{'epsilon':<10}if this were so (a bound, PLD, at delta {plan.delta:g})"]
    for words, assumed in assumptions(event):
        if assumed is None:
            rows.append(f"{'unknown':<10}{words}")
            continue
        (answer,) = compare(assumed, plan.delta, ["pld"])
        if answer.epsilon is None:
            rows.append(f"{'-':<10}{words} (not computed: {answer.note})")
        else:
            rows.append(f"{answer.epsilon.rounded_up(2):<10.2f}{words}")
    return [
        f"{NO_GUARANTEE}.",
        f"The paper's figure is {figure:.3f} (GDP-CLT, an estimate under assumptions that do not "
        "hold).",
        "",
        *rows,
    ]


def sweep_table(swept: Sequence[dict[str, float]], rows: Sequence[Forecast]) -> str:
    """Return a line for each combination of the swept options."""
    from hf_dp.accounting import epsilon
    from hf_dp.benchmarks.tables import aligned

    mechanism = rows[0].plan.mechanism
    published = isinstance(mechanism, PublishedPlan)
    both = isinstance(mechanism, PrivateEncoderPlan)
    names = [answer.accountant for answer in rows[0].answers]
    header = [*swept[0], "steps", *(["gradient noise"] if both else []), "vector noise"]
    header += ["paper's figure"] if published else names
    lines = []
    for values, row in zip(swept, rows, strict=True):
        plan = row.plan
        assert isinstance(plan.mechanism, ForwardPlan)
        cells = [*(f"{value:g}" for value in values.values()), str(plan.steps)]
        cells += [f"{plan.noise_multiplier:.6g}"] if both else []
        cells.append(f"{plan.mechanism.vector_noise_multiplier:.6g}")
        if published:
            cells.append(f"{epsilon(plan.event(), plan.delta, 'gdp_clt').value:.3f}")
        else:
            cells += [
                "-" if answer.epsilon is None else f"{answer.epsilon.rounded_up(3):.3f}"
                for answer in row.answers
            ]
        lines.append(cells)
    legend = "noise: noise multipliers"
    end = f"{NO_GUARANTEE}." if published else f"epsilon by {', '.join(names)}"
    return "\n".join([aligned(header, lines), f"{legend}; {end}"])
