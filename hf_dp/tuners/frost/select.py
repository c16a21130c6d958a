"""PSEL: choose the partitions with the largest gradient magnitudes (DP-FROST, Algorithm 4), as
PGM-EST estimates them from noisy observations (section 4.5, Algorithm 5).

Each iteration takes a few partitions. Those that are clearly large are taken early; later
magnitudes are then clipped over fewer partitions, and their noise weighs less. Everything here is
computed from noisy magnitudes, so it costs no privacy beyond theirs.

Where Algorithm 4 (line 20) ends an iteration at the first partition that exceeds what is left of
the ratio, we skip it and try the next one. RoBERTa's word embedding is 31 % of the model: an
iteration in which noise ranks it first would select nothing. We end an iteration at the first
partition below the threshold. They are in order, so no later one passes.

*The estimate.* In iteration t the noisy magnitude of each remaining partition i was observed:
``o_ti = lambda_t v_i + noise``, with standard deviation ``sigma Delta_t``. Unknown are the
magnitudes v_i on all data and the scales lambda_t of the samples; the first scale is the sample
rate. The likelihood is maximized in alternation over magnitudes and scales, each in closed form.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from hf_dp._validate import invalid

_ROLE = re.compile(r"(weight|bias)$")


@dataclass(frozen=True)
class Partition:
    """Parameters that are chosen together."""

    name: str  # stable, made from the model's own names
    parameters: tuple[str, ...]  # names as ``named_parameters`` gives them, in its order
    owners: tuple[str, ...]  # every module that uses one of them, including modules tied to it
    size: int  # how many numbers they hold, |P|


def partitions(model: nn.Module, among: Iterable[nn.Parameter] | None = None) -> list[Partition]:
    """Return the trainable parameters of ``model`` as disjoint partitions.

    Partitions come in the order of their first parameters. Tied parameters count as one, and what
    is tied to a partition belongs to it (the bias of a vocabulary to its embedding).

    Args: among: only these parameters; by default the trainable ones.
    """
    if among is None:
        among = (parameter for parameter in model.parameters() if parameter.requires_grad)
    allowed = set(among)
    named = model.named_parameters()
    first = {parameter: name for name, parameter in named if parameter in allowed}
    keys: dict[str, str] = {}  # parameter -> the key of its partition
    owners: dict[str, list[str]] = {name: [] for name in first.values()}
    seen: dict[str, int] = {}  # keys, in the order in which they came
    joined: dict[str, str] = {}

    def root(key: str) -> str:
        while joined.get(key, key) != key:
            key = joined[key]
        return key

    for module_name, module in model.named_modules():
        for local, parameter in module.named_parameters(recurse=False):
            if parameter not in first:
                continue
            name = first[parameter]
            owners[name].append(module_name)
            stem = _ROLE.sub("", local).rstrip("._")
            key = ".".join(filter(None, [module_name, stem]))
            seen.setdefault(key, len(seen))
            if name in keys:
                # The parameter is tied: the partition that came first absorbs the other one.
                one, other = sorted((root(key), root(keys[name])), key=seen.__getitem__)
                joined[other] = one
            keys.setdefault(name, key)
    groups: dict[str, list[str]] = {}
    for name in first.values():
        groups.setdefault(root(keys[name]), []).append(name)
    sizes = {name: parameter.numel() for parameter, name in first.items()}
    return [
        Partition(
            key,
            tuple(names),
            tuple(dict.fromkeys(owner for name in names for owner in owners[name])),
            sum(sizes[name] for name in names),
        )
        for key, names in groups.items()
    ]


def refuse_too_small(partitions: Sequence[Partition], unfreeze_ratio: float) -> None:
    """Raise InvalidArgumentError when even the smallest partition exceeds the ratio."""
    total = sum(partition.size for partition in partitions)
    smallest = min(partitions, key=lambda partition: partition.size)
    if smallest.size > unfreeze_ratio * total:
        expected = (
            f"to leave room for the smallest partition, {smallest.name!r} with {smallest.size:,} "
            f"of {total:,} numbers"
        )
        raise invalid("unfreeze_ratio", unfreeze_ratio, expected, "Raise it.")


ITERATIONS = 1000  # J

# Returns the noisy magnitudes of the remaining partitions, in their order, and the sensitivity that
# the noise was scaled to.
Observe = Callable[[Sequence[Partition]], tuple[Sequence[float], float]]


@dataclass(frozen=True)
class Selection:
    """What was chosen, in the order in which it was taken, and from which released observations."""

    names: tuple[str, ...]
    observed: tuple[dict[str, float], ...]  # for each iteration, noisy magnitudes by partition
    sensitivities: tuple[float, ...]  # for each iteration


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
        noise_multiplier: sigma_ps; 0 for magnitudes without noise.
    """
    refuse_too_small(partitions, unfreeze_ratio)
    total = sum(partition.size for partition in partitions)
    budget = unfreeze_ratio * total
    index = {partition.name: position for position, partition in enumerate(partitions)}
    observed = np.full((0, len(partitions)), np.nan)
    sensitivities: list[float] = []
    remaining, used = list(partitions), 0
    selected: list[Partition] = []
    for t in range(1, iterations + 1):
        if not remaining:
            break
        noisy, sensitivity = observe(remaining)
        row = np.full(len(partitions), np.nan)
        row[[index[partition.name] for partition in remaining]] = noisy
        observed = np.vstack([observed, row])
        sensitivities.append(sensitivity)
        magnitudes = estimate(observed, sensitivities, sample_rate)
        scales = scales_of(observed, magnitudes, sample_rate)
        deviation = math.sqrt(variance(noise_multiplier, scales, sensitivities))
        # By increasing magnitude. Ties are broken by name, so that the same numbers give the same
        # choice everywhere.
        order = sorted(
            remaining, key=lambda partition: (magnitudes[index[partition.name]], partition.name)
        )
        frozen = _last_frozen(order, (1 - unfreeze_ratio) * total)
        threshold = magnitudes[index[frozen.name]] + gap_coefficient * deviation
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
    return Selection(
        tuple(partition.name for partition in selected),
        tuple(
            {name: float(value) for name, value in zip(index, row) if not math.isnan(value)}
            for row in observed
        ),
        tuple(sensitivities),
    )


def _last_frozen(order: Sequence[Partition], numbers: float) -> Partition:
    """Return the largest of the partitions that are expected to stay frozen. These are the smallest
    partitions that together hold ``numbers``."""
    held = 0
    for partition in order:
        held += partition.size
        if held >= numbers:
            return partition
    return order[-1]


def estimate(
    observed: np.ndarray,
    sensitivities: Sequence[float],
    sample_rate: float,
    iterations: int = ITERATIONS,
) -> np.ndarray:
    """Estimate the magnitudes v, (M,).

    Args:
        observed: (t, M) noisy magnitudes, NaN for a partition that no longer remained.
        sensitivities: (t,), Delta.
        sample_rate: q_ps, the value of the first scale. At t = 1 the estimate is therefore
            o_1 / q_ps, as in section 4.5. Algorithm 5, line 2, returns o_1 itself, which differs
            by a common factor.
        iterations: J, how often magnitudes and scales are updated.
    """
    observed = np.atleast_2d(np.asarray(observed, dtype=np.float64))
    there = ~np.isnan(observed)
    values = np.where(there, observed, 0.0)
    inverse = 1 / np.asarray(sensitivities, dtype=np.float64) ** 2
    scales = np.ones(len(observed))
    scales[0] = sample_rate
    magnitudes = values[0] / sample_rate
    for _ in range(iterations if len(observed) > 1 else 0):
        # Lemma 5: v_i = sum_t (o_ti lambda_t / Delta_t^2) / sum_t (lambda_t^2 / Delta_t^2), over
        # the iterations t that observed i.
        weight = scales * inverse
        magnitudes = (weight @ values) / ((weight * scales) @ there)
        before, scales = scales, scales_of(observed, magnitudes, sample_rate)
        if np.array_equal(before, scales):
            break  # further updates change nothing
    return magnitudes


def scales_of(observed: np.ndarray, magnitudes: np.ndarray, sample_rate: float) -> np.ndarray:
    """Return the scales (t,) that fit these magnitudes; the first is the sample rate. Lemma 4:
    lambda_t = sum_i o_ti v_i / sum_i v_i^2, over the partitions i observed in t."""
    squares = ~np.isnan(observed) @ magnitudes**2
    products = np.nan_to_num(observed) @ magnitudes
    found = np.divide(products, squares, out=np.ones(len(observed)), where=squares > 0)
    found[0] = sample_rate
    return found


def variance(noise_multiplier: float, scales: np.ndarray, sensitivities: Sequence[float]) -> float:
    """Return the variance of the estimate for a partition that remained in all iterations. By Lemma
    6 it is ``sigma^2 / sum_t (lambda_t^2 / Delta_t^2)``."""
    ratios = np.asarray(scales, dtype=np.float64) / np.asarray(sensitivities, dtype=np.float64)
    return float(noise_multiplier**2 / np.sum(ratios**2))
