"""A model's parameters as disjoint partitions (DP-FROST, section 4.3).

By default a partition is one weight matrix with its bias.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
