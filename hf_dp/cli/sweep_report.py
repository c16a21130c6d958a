"""Report a sweep: a table, and what all its private runs cost together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_dp.cli.cell_runs import Cell
from hf_dp.errors import ConfigError
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.plans.units import FEATURES, NONE, weakest_unit
from hf_dp.statement.wording import NOT_PRIVATE, PROVEN_WEIGHTS_ONLY, STATUSES

# A cell and its row: hf_dp.cli.cell_runs.result's, and what the sweep has added to it.
Results = Mapping[Cell, Mapping[str, Any]]


def table(results: Results) -> str:
    """Return each combination's metrics: mean over its seeds, and the smallest and largest."""
    lines = []
    for label, rows in _by_label(results).items():
        said = []
        for metric in sorted({metric for row in rows for metric in row["metrics"]}):
            values = [row["metrics"][metric] for row in rows if metric in row["metrics"]]
            spread = f" ({min(values):.4f} to {max(values):.4f}, {len(values)} seeds)"
            said.append(f"{metric} {statistics.mean(values):.4f}{spread * (len(values) > 1)}")
        row = rows[0]
        zero_shot = sorted(row.get("zero_shot", {}).items())
        said += [f"zero-shot {metric} {value:.4f}" for metric, value in zero_shot]
        if "size" in row:
            said.append(f"{row['size']['parameters']:.1f} M parameters without embeddings")
        said += _times([each["times"] for each in rows if "times" in each])
        without = row.get("status") or NOT_PRIVATE
        only = " (of the weights only)" if without == PROVEN_WEIGHTS_ONLY else ""
        epsilon = row["epsilon"]
        said.append(STATUSES[without] if epsilon is None else f"epsilon {epsilon:.3f} a run{only}")
        lines.append(f"{label or 'recipe'}: {'; '.join(said)}")
    if any(row.get("times") for row in results.values()):
        lines.append(
            "times: of training in the main process, a selection included; epsilon does not cover "
            "them"
        )
    return "\n".join(lines)


def best(results: Results, score: str) -> str:
    """Return which combination has the best mean over its seeds, in words.

    Raises: ConfigError for a metric that a run lacks.
    """
    for row in results.values():
        if score not in row["metrics"]:
            raise ConfigError(
                f"Expected `--best` to be one of {sorted(row['metrics'])}, got {score!r}."
            )
    means = {
        label: statistics.mean(row["metrics"][score] for row in rows)
        for label, rows in _by_label(results).items()
    }
    chosen = max(means, key=lambda label: signed(score, means[label]))
    return f"best by {score}: {chosen or 'recipe'}: {means[chosen]:.4f}"


def signed(score: str, value: float) -> float:
    """Return a score of which the larger is the better, and one that is not a number is worst."""
    if math.isnan(value):
        return -math.inf
    return -value if score.endswith("perplexity") else value


def _times(rows: Sequence[Mapping[str, Mapping[str, float]]]) -> Iterable[str]:
    """Yield how long the runs of a combination took: the mean over its seeds, in words."""
    for part in ("training", "selection"):
        found = [row[part] for row in rows if part in row]
        if found:
            wall, processor = (
                statistics.mean(each[kind] for each in found) for kind in ("wall", "processor")
            )
            yield f"{part} {wall:.1f} s (processor {processor:.1f} s)"


def _by_label(results: Results) -> dict[str, list[Mapping[str, Any]]]:
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for cell, row in results.items():
        rows.setdefault(cell.label, []).append(row)
    return rows


def spent_together(cells: Sequence[Cell]) -> str:
    """Return what all private runs of the sweep cost on the rows that they share.

    Their ledgers are composed, those of unfinished runs included.
    """
    from hf_dp.accounting import epsilon
    from hf_dp.run.ledger_file import LEDGER
    from hf_dp.run.witnesses import read_run
    from hf_dp.statement.record import FILE_NAME

    records = [
        read_run(path)
        for cell in cells
        for path in cell.attempts
        if any((path / name).exists() for name in (LEDGER, FILE_NAME))
    ]
    if not records:
        return ""
    if any(record.insecure_seed for record in records):
        return (
            "some of these runs drew their noise from a fixed seed (insecure_seed): no epsilon "
            "holds for all together"
        )
    if any(
        record.plan.unit == NONE or any(not event.established for event in record.ledger.events)
        for record in records
    ):
        return (
            "DP-FP as published is among these runs: no differential privacy guarantee is "
            "established for any of them, nor for all together"
        )
    owners = {_owner(record.plan) for record in records}
    if len(owners) > 1:
        return (
            f"these {len(records)} private runs protect different units "
            f"({', '.join(sorted(owners))}): no epsilon is stated for all together"
        )
    (owner,) = owners
    whose = owner
    if weakest_unit(record.plan.unit for record in records) == FEATURES:
        whose = f"{owner} without its label, which is public"
    # A guarantee at the smallest delta holds at every larger one.
    delta = min(record.plan.delta for record in records)
    total = epsilon([event for record in records for event in record.ledger.events], delta, "rdp")
    besides = (
        "; some also released values without noise, which no epsilon covers"
        if any(record.status == PROVEN_WEIGHTS_ONLY for record in records)
        else ""
    )
    return (
        f"all {len(records)} private runs together: epsilon {total.rounded_up(3)} at delta "
        f"{delta:g} (rdp, a bound) for {whose}; that is what holds for anyone who sees more than "
        f"one of them{besides}"
    )


def _owner(plan: PrivacyPlan) -> str:
    """Return whose data a run protects, in words that tell two columns of users apart."""
    if plan.users is None:
        return "one row"
    return f"one {plan.users.name} by {plan.users.column!r}"
