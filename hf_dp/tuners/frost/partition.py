"""A model's parameters as disjoint partitions (DP-FROST, section 4.3).

By default a partition is one weight matrix with its bias.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from hf_dp._validate import invalid, one_of

GRANULARITIES = ("weight", "module")
_ROLE = re.compile(r"(weight|bias)$")


@dataclass(frozen=True)
class Partition:
    """Parameters that are chosen together.

    Attributes:
        name: stable, made from the model's own names.
        parameters: their names as ``named_parameters`` gives them, in its order.
        owners: every module that uses one of them, including modules tied to it.
        size: how many numbers they hold, |P|.
    """

    name: str
    parameters: tuple[str, ...]
    owners: tuple[str, ...]
    size: int


def partitions(
    model: nn.Module,
    granularity: str = "weight",
    own: Mapping[str, Sequence[str]] | None = None,
    among: Collection[nn.Parameter] | None = None,
) -> list[Partition]:
    """Return the trainable parameters of ``model`` as disjoint partitions.

    Partitions come in the order of their first parameters. Tied parameters count as one, and what
    is tied to a partition belongs to it (the bias of a vocabulary to its embedding).

    Args:
        granularity: ``"weight"`` for a weight matrix with its bias, ``"module"`` for everything
            that one module owns.
        own: partitions of your own, name -> parameter names; a trailing * matches any end.
            Parameters that it does not name follow ``granularity``.
        among: only these parameters; by default the trainable ones.

    Raises: InvalidArgumentError for an unknown granularity, a name that matches nothing, or a
        parameter named twice.
    """
    one_of("granularity", granularity, GRANULARITIES)
    if among is None:
        among = {parameter for parameter in model.parameters() if parameter.requires_grad}
    first = {parameter: name for name, parameter in model.named_parameters() if parameter in among}
    named = _own(own or {}, list(first.values()))
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
            stem = "" if granularity == "module" else _ROLE.sub("", local).rstrip("._")
            key = named.get(name) or ".".join(filter(None, [module_name, stem]))
            seen.setdefault(key, len(seen))
            if name in keys and name not in named:
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


def _own(own: Mapping[str, Sequence[str]], names: Sequence[str]) -> dict[str, str]:
    """Map parameters to the user's own partitions that hold them."""
    found: dict[str, str] = {}
    for partition, patterns in own.items():
        for pattern in patterns:
            ends = pattern.endswith("*")
            matched = [n for n in names if n == pattern or (ends and n.startswith(pattern[:-1]))]
            if not matched:
                raise invalid(
                    "partitions",
                    pattern,
                    "to name a parameter that may be chosen",
                    "See `hf-dp partitions MODEL`.",
                )
            for name in matched:
                if name in found:
                    raise invalid(
                        "partitions",
                        name,
                        "to be in one partition",
                        f"It is in {found[name]!r} already. Remove it from one of the two.",
                    )
                found[name] = partition
    return found
