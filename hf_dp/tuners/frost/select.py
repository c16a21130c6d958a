"""PSEL: choose the partitions with the largest gradient magnitudes (DP-FROST, Algorithm 4).

Each iteration takes a few partitions. Those that are clearly large are taken early; later
magnitudes are then clipped over fewer partitions, and their noise weighs less. Everything here is
computed from noisy magnitudes, so it costs no privacy beyond theirs.

Where Algorithm 4 (line 20) ends an iteration at the first partition that exceeds what is left of
the ratio, we skip it and try the next one. RoBERTa's word embedding is 31 % of the model: an
iteration in which noise ranks it first would select nothing. We end an iteration at the first
partition below the threshold. They are in order, so no later one passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hf_dp.errors import InvalidArgumentError
from hf_dp.tuners.frost.estimate import estimate, scales_of, variance
from hf_dp.tuners.frost.partition import Partition

# Returns the noisy magnitudes of the remaining partitions, in their order, and the sensitivity that
# the noise was scaled to.
Observe = Callable[[Sequence[Partition]], tuple[Sequence[float], float]]


@dataclass(frozen=True)
class Selection:
    """What was chosen, and from which released observations.

    Attributes:
        names: of the selected partitions, in the order in which they were taken.
        observed: for each iteration, the noisy magnitudes by partition name.
        sensitivities: for each iteration.
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
    """Select partitions with at most ``unfreeze_ratio`` of all numbers, by noisy magnitude.

    Args:
        observe: called once in each iteration, with the partitions that remain.
        unfreeze_ratio: gamma in (0, 1].
        iterations: T; 1 is the single-shot variant.
        sample_rate: q_ps.
        gap_coefficient: nu.
        noise_multiplier: sigma_ps; 0 for magnitudes without noise (tests).

    Raises: InvalidArgumentError when even the smallest partition exceeds ``unfreeze_ratio``.
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
        # By increasing magnitude. Ties are broken by name, so that the same numbers give the same
        # choice everywhere.
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
    """Raise InvalidArgumentError when even the smallest partition exceeds the ratio."""
    total = sum(partition.size for partition in partitions)
    smallest = min(partitions, key=lambda partition: partition.size)
    if smallest.size > unfreeze_ratio * total:
        raise InvalidArgumentError(
            f"Expected `unfreeze_ratio` to leave room for a partition, got {unfreeze_ratio!r}. It "
            f"allows {unfreeze_ratio * total:,.0f} of {total:,} numbers, and the smallest "
            f"partition, {smallest.name!r}, has {smallest.size:,}. Raise it."
        )


def _last_frozen(order: Sequence[Partition], numbers: float) -> Partition:
    """Return the largest of the partitions that are expected to stay frozen.

    These are the smallest partitions that together hold ``numbers``.
    """
    held = 0
    for partition in order:
        held += partition.size
        if held >= numbers:
            return partition
    return order[-1]
