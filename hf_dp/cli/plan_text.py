"""What ``hf-dp plan`` prints: a plan to read, for sums and for DP-FP, and a table of several."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_dp.cli.answers import table
from hf_dp.errors import HfDpError
from hf_dp.plans.dp_fp import DP_FP, FROZEN, PRIVATE_ENCODER, PUBLISHED
from hf_dp.plans.draws import POISSON
from hf_dp.plans.units import SAMPLINGS, Users

if TYPE_CHECKING:
    from hf_dp.batches.units import UnitTable
    from hf_dp.planning import Forecast
    from hf_dp.plans.privacy import PrivacyPlan

NO_GUARANTEE = (
    "DP-FP as published has NO differential privacy guarantee: no epsilon is known for it"
)


def sums(found: Forecast) -> str:
    """Return the plan of a run whose steps release noised sums, to read."""
    plan = found.plan
    drawn = "" if plan.words.sampling_code == POISSON else f", {plan.words.drawn}"
    what = "examples" if plan.users is None else "rows" if plan.users.by_row else "users"
    most = plan.mechanism.draw.most(plan)
    capped = "" if most == plan.drawn_from else f", of which at most {most} are used"
    lines = [
        f"{plan.drawn_from:,} {what}, {plan.expected_batch_size:g} expected in a step{capped}: "
        f"sample rate {plan.sample_rate:.6g}{drawn}",
        f"{plan.steps:,} steps, {found.epochs:.4g} epochs, {found.examples:,.0f} {what} in all",
        f"noise multiplier {plan.noise_multiplier:.6g}, effective "
        f"{found.effective_noise_multiplier:.5g} (/ sample rate)",
    ]
    lines += plan.mechanism.outline(plan)
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


def rows_of_users(table: UnitTable, users: Users) -> str:
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


def both_ways(
    units: UnitTable, plan: PrivacyPlan, plan_with: Callable[[Mapping[str, Any]], PrivacyPlan]
) -> str:
    """Compare drawing users with drawing their rows, at the same epsilon, steps and rows a step.

    Args: plan_with: returns the plan with some arguments changed.
    """
    users, epsilon = plan.users, plan.target_epsilon
    assert users is not None
    if epsilon is None:
        return "Give a target_epsilon to compare drawing users with drawing their rows."
    rows_of_one = len(units.capped(users.max_rows)) / len(units)
    rows = plan.expected_batch_size * (1 if users.by_row else rows_of_one)
    lines = [
        f"\nNoise on the mean gradient of a step of about {rows:,.0f} rows, in clipping norms, at "
        f"epsilon {epsilon:g}:"
    ]
    for sampling in SAMPLINGS:
        by_row = dataclasses.replace(users, sampling=sampling, num_rows=None).by_row
        drawn = round(rows if by_row else rows / rows_of_one)
        changes: dict[str, Any] = {"expected_batch_size": drawn, "max_steps": plan.steps}
        changes |= {
            "unit_sampling": sampling,
            "unit_reduction": None if by_row else users.reduction,
        }
        try:
            said = f"{plan_with(changes).noise_multiplier / drawn:.4g}"
        except HfDpError as problem:
            said = f"not possible ({problem})"
        chosen = " (as configured)" if sampling == users.sampling else ""
        lines.append(f"  unit_sampling={sampling}{chosen}: {said}")
    lines.append(
        "The smaller is the better one if a user's mean gradient is about as long as a row's. It "
        "is shorter where the rows of a user differ much."
    )
    return "\n".join(lines)


def forward(found: Forecast) -> str:
    """Return the plan of a variant, to read."""
    plan = found.plan
    mechanism: Any = plan.mechanism
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
    if mechanism.variant == PUBLISHED:
        return "\n".join([*lines, "", *_published(plan)])
    return "\n".join([*lines, "", table(found.answers, plan.delta)])


def _noise_in_words(plan: PrivacyPlan, mechanism: Any) -> list[str]:
    std = mechanism.vector_noise_multiplier * mechanism.vector_clipping_norm
    vectors = (
        f"noise multiplier {mechanism.vector_noise_multiplier:.6g}, standard deviation {std:.6g} "
        "in each coordinate"
    )
    rate = f"sample rate {plan.sample_rate:.6g}"
    if mechanism.variant == PRIVATE_ENCODER:
        draws = {
            "separate": "two independent draws a step, for gradients and for vectors",
            "shared": "one draw a step, for gradients and vectors",
        }
        return [
            f"gradients below: noise multiplier {plan.noise_multiplier:.6g}, {rate}",
            f"vectors: {vectors}",
            draws[mechanism.draws],
        ]
    if mechanism.variant == FROZEN and not mechanism.releases_each_step:
        return [
            f"one vector of each row, released before the first step: {vectors}",
            "more epochs on these vectors cost nothing",
        ]
    draws_of = getattr(mechanism, "num_micro_batches", 1)
    return [
        f"vectors of the rows drawn: {vectors}",
        f"{draws_of} independent draw{'s' if draws_of > 1 else ''} a step, {rate} each",
    ]


def _labels_in_words(mechanism: Any) -> str:
    if mechanism.labels_in_vector:
        return f"in the vector, among {mechanism.num_classes} classes; covered"
    epsilon = getattr(mechanism, "label_epsilon", None)
    if epsilon is not None:
        return f"randomized response with epsilon {epsilon:g}, which the figure below includes"
    if mechanism.variant == PUBLISHED:
        return "not protected"
    return "public"


def _published(plan: PrivacyPlan) -> list[str]:
    """Return the paper's figure with what it is, and what a bound says of the same noise."""
    from hf_dp.accounting import epsilon
    from hf_dp.accounting.accountants import compare
    from hf_dp.planning.published_forward import assumptions

    event: Any = plan.event()
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


def table_of(swept: Sequence[Mapping[str, float]], rows: Sequence[Forecast]) -> str:
    """Return a line for each combination of the swept arguments."""
    from hf_dp.accounting import epsilon
    from hf_dp.benchmarks.tables import aligned

    names = [answer.accountant for answer in rows[0].answers]
    mode = rows[0].plan.mechanism.privacy_mode
    lines: list[list[str]] = []
    header: list[str] = []
    for values, row in zip(swept, rows, strict=True):
        plan = row.plan
        mechanism: Any = plan.mechanism
        cells = {name: f"{value:g}" for name, value in values.items()}
        if mode != DP_FP:
            cells["sample rate"] = f"{plan.sample_rate:.6g}"
        cells["steps"] = str(plan.steps)
        if mode != DP_FP:
            cells["noise"] = f"{plan.noise_multiplier:.6g}"
            cells["effective"] = f"{row.effective_noise_multiplier:.5g}"
        elif mechanism.variant == PRIVATE_ENCODER:
            cells["gradient noise"] = f"{plan.noise_multiplier:.6g}"
        if mode == DP_FP:
            cells["vector noise"] = f"{mechanism.vector_noise_multiplier:.6g}"
        published = mode == DP_FP and mechanism.variant == PUBLISHED
        if published:
            figure = epsilon(plan.event(), plan.delta, "gdp_clt").value
            cells["paper's figure"] = f"{figure:.3f}"
        else:
            cells |= {answer.accountant: _cell(answer) for answer in row.answers}
        if row.signal_to_noise is not None:
            cells["signal/noise"] = f"{row.signal_to_noise:.3g}"
        header = list(cells)
        lines.append(list(cells.values()))
    effective = "" if mode == DP_FP else "; effective: noise multiplier / sample rate"
    end = f"{NO_GUARANTEE}." if published else f"epsilon by {', '.join(names)}"
    return f"{aligned(header, lines)}\nnoise: noise multiplier{effective}; {end}"


def _cell(answer: Any) -> str:
    return "-" if answer.epsilon is None else f"{answer.epsilon.rounded_up(3):.3f}"
