"""PSEL: choose the partitions with the largest gradient magnitudes, a few in each iteration
(DP-FROST, Algorithm 4).

What is large and certain is taken early: the later magnitudes are then clipped over fewer
partitions, and their noise weighs less. Everything here is computed from noisy magnitudes, so it
costs no privacy beyond theirs.

Two readings of ours where the algorithm leaves one open. A partition that does not fit into what is
left is skipped and the next one tried (RoBERTa's word embedding is 31 % of the model: stopping at
it would select nothing). A partition below the threshold ends the iteration (as written, Algorithm
4's loop would not end).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hf_dp.errors import InvalidArgumentError
from hf_dp.tuners.frost.estimate import estimate, scales_of, variance
from hf_dp.tuners.frost.partition import Partition

# For the remaining partitions: noisy magnitudes in their order, and the sensitivity they were
# noised for.
Observe = Callable[[Sequence[Partition]], tuple[Sequence[float], float]]


@dataclass(frozen=True)
class Selection:
    """What was chosen, and from which published observations.

    Attributes: names: of the selected partitions, in the order they were taken. observed: an entry
        for each iteration, noisy magnitude by partition name. sensitivities: of each iteration.
        unfreeze_ratio: gamma.
    """

    names: tuple[str, ...]
    observed: tuple[dict[str, float], ...]
    sensitivities: tuple[float, ...]
    unfreeze_ratio: float


def select(
    partitions: Sequence[Partition],
    observe: Observe,
    *,
    unfreeze_ratio: float,
    iterations: int,
    sample_rate: float,
    gap_coefficient: float,
    noise_multiplier: float,
) -> Selection:
    """At most ``unfreeze_ratio`` of all numbers, by noisy magnitude.

    Args:
        observe: called once an iteration, with the partitions that remain.
        unfreeze_ratio: gamma in (0, 1]. iterations: T; 1 is the single-shot variant. sample_rate:
            q_ps.
        gap_coefficient: nu. noise_multiplier: sigma_ps; 0 for magnitudes without noise (tests).

    Raises: InvalidArgumentError when no partition fits into the budget.
    """
    total = sum(partition.size for partition in partitions)
    budget = unfreeze_ratio * total
    refuse_too_small(partitions, unfreeze_ratio)
    index = {partition.name: position for position, partition in enumerate(partitions)}
    observed = np.full((0, len(partitions)), np.nan)
    sensitivities: list[float] = []
    remaining, selected, used = list(partitions), [], 0
    for t in range(1, iterations + 1):
        if not remaining:
            break
        noisy, sensitivity = observe(remaining)
        row = np.full(len(partitions), np.nan)
        row[[index[partition.name] for partition in remaining]] = noisy
        observed = np.vstack([observed, row])
        sensitivities.append(sensitivity)
        magnitudes = estimate(observed, sensitivities, sample_rate)
        deviation = math.sqrt(
            variance(noise_multiplier, scales_of(observed, magnitudes, sample_rate), sensitivities)
        )
        # Increasing magnitude; ties by name, so that equal numbers choose equally everywhere.
        order = sorted(
            remaining, key=lambda partition: (magnitudes[index[partition.name]], partition.name)
        )
        threshold = (
            magnitudes[index[_last_frozen(order, (1 - unfreeze_ratio) * total).name]]
            + gap_coefficient * deviation
        )
        allowed = budget if t == iterations else t * budget / iterations
        taken = []
        for partition in reversed(order):
            if t < iterations and not magnitudes[index[partition.name]] > threshold:
                break
            if used + partition.size <= allowed:
                taken.append(partition)
                used += partition.size
        selected += taken
        remaining = [partition for partition in remaining if partition not in taken]
    names = [partition.name for partition in partitions]
    return Selection(
        tuple(partition.name for partition in selected),
        tuple(
            {n: float(v) for n, v in zip(names, row, strict=True) if not math.isnan(v)}
            for row in observed
        ),
        tuple(sensitivities),
        unfreeze_ratio,
    )


def refuse_too_small(partitions: Sequence[Partition], unfreeze_ratio: float) -> None:
    """Raise InvalidArgumentError when not even the smallest partition fits into the ratio."""
    total = sum(partition.size for partition in partitions)
    smallest = min(partitions, key=lambda partition: partition.size)
    if smallest.size > unfreeze_ratio * total:
        raise InvalidArgumentError(
            f"Expected `unfreeze_ratio` to leave room for a partition, got {unfreeze_ratio!r}: "
            f"{unfreeze_ratio * total:,.0f} of {total:,} numbers, and the smallest partition, "
            f"{smallest.name!r}, has {smallest.size:,}. Raise it."
        )


def _last_frozen(order: Sequence[Partition], numbers: float) -> Partition:
    """The largest of the partitions expected to stay frozen: the smallest ones that hold
    ``numbers`` together."""
    held = 0
    for partition in order:
        held += partition.size
        if held >= numbers:
            return partition
    return order[-1]
