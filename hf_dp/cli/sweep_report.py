"""Report a sweep: a table, and what all its private runs cost together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from hf_dp.cli.cells import Cell
from hf_dp.errors import ConfigError
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.plans.units import FEATURES, NONE, weakest_unit
from hf_dp.statement.statement import PROVEN_WEIGHTS_ONLY

TIMES_NOTE = (
    "times: of training in the main process, a selection included; epsilon does not cover them"
)


def table(results: dict[Cell, dict[str, Any]]) -> str:
    """Return each combination's metrics: mean over its seeds, and the smallest and largest."""
    lines = []
    for label, rows in _by_label(results).items():
        cells = []
        for metric in sorted({metric for row in rows for metric in row["metrics"]}):
            values = [row["metrics"][metric] for row in rows if metric in row["metrics"]]
            spread = (
                f" ({min(values):.4f} to {max(values):.4f}, {len(values)} seeds)"
                if len(values) > 1
                else ""
            )
            cells.append(f"{metric} {statistics.mean(values):.4f}{spread}")
        cells += [
            f"zero-shot {metric} {value:.4f}"
            for metric, value in sorted(rows[0].get("zero_shot", {}).items())
        ]
        if (size := rows[0].get("size")) is not None:
            cells.append(f"{size.without_embeddings:,} parameters without embeddings")
        cells += _times(rows)
        epsilon = rows[0]["epsilon"]
        without = rows[0].get("status") or "not private"
        only = " (of the weights only)" if without == PROVEN_WEIGHTS_ONLY else ""
        cells.append(without if epsilon is None else f"epsilon {epsilon:.3f} a run{only}")
        lines.append(f"{label or 'recipe'}: {'; '.join(cells)}")
    return "\n".join(lines)


def best(results: dict[Cell, dict[str, Any]], score: str) -> str:
    """Return which combination has the best mean over its seeds, in words.

    Raises: ConfigError for a metric that a run lacks.
    """
    means = {}
    for label, rows in _by_label(results).items():
        lacking = [row for row in rows if score not in row["metrics"]]
        if lacking:
            raise ConfigError(
                f"Expected `--best` to be one of {sorted(lacking[0]['metrics'])}, got {score!r}."
            )
        means[label] = statistics.mean(row["metrics"][score] for row in rows)
    chosen = max(means, key=lambda label: signed(score, means[label]))
    return f"best by {score}: {chosen or 'recipe'}: {means[chosen]:.4f}"


def signed(score: str, value: float) -> float:
    """Return a score of which the larger is the better, and one that is not a number is worst."""
    if math.isnan(value):
        return -math.inf
    return -value if score.endswith("perplexity") else value


def _times(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return how long the runs of a combination took: the mean over its seeds, in words."""
    known = [row["times"] for row in rows if row.get("times")]
    said = []
    for part in ("training", "selection"):
        found = [times[part] for times in known if part in times]
        if found:
            wall, processor = (
                statistics.mean(each[kind] for each in found) for kind in ("wall", "processor")
            )
            said.append(f"{part} {wall:.1f} s (processor {processor:.1f} s)")
    return said


def _by_label(results: dict[Cell, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for cell, result in results.items():
        rows.setdefault(cell.label, []).append(result)
    return rows


def spent_together(cells: Sequence[Cell]) -> str:
    """Return what all private runs of the sweep cost on the rows that they share.

    Their ledgers are composed, those of unfinished runs included.
    """
    from hf_dp.accounting import epsilon
    from hf_dp.statement.record import FILE_NAME, read

    folders = [path for cell in cells for path in cell.attempts if (path / FILE_NAME).exists()]
    records = [read(path) for path in folders]
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
