"""Show what DP-FROST chose, by transformer block and kind of matrix, from ``selection.json``.

Everything here is computed from noisy magnitudes that the run released, so it costs no privacy.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_dp.errors import ConfigError
from hf_dp.tuners.frost.select import estimate
from hf_dp.tuners.frost.tuner import FrostConfig, Made
from hf_dp.tuners.public_choice import BLOCK
from hf_dp.tuners.selection import FILE_NAME

# What a matrix does, by the end of its name, in the order in which a block computes; the names of
# BERT, RoBERTa, MPNet, DistilBERT, ViT, DINOv2, GPT-2, OPT, Llama and ModernBERT.
KINDS = {
    "query": r"(query|q_proj|q_lin|attn\.q|SelfAttention\.q)",
    "key": r"(key|k_proj|k_lin|attn\.k|SelfAttention\.k)",
    "value": r"(value|v_proj|v_lin|attn\.v|SelfAttention\.v)",
    "query, key, value": r"(c_attn|Wqkv|qkv)",
    "attention output": r"(attention\.output\.dense|o_proj|out_lin|out_proj|attn\.c_proj|attn\.o|"
    r"attn\.Wo|SelfAttention\.o)",
    "intermediate": r"(intermediate\.dense|fc1|c_fc|lin1|up_proj|mlp\.Wi|wi)",
    "gate": r"gate_proj",
    "output": r"(output\.dense|fc2|mlp\.c_proj|lin2|down_proj|mlp\.Wo|wo)",
    "layer norm": r"(\w*norm\w*|\w*LayerNorm\w*|ln_\w+)",
}
_ENDS = {kind: re.compile(rf"(^|.*\.){pattern}$") for kind, pattern in KINDS.items()}


@dataclass(frozen=True)
class Part:
    """One partition."""

    name: str
    block: str  # which transformer block it is in, "" outside the blocks
    kind: str  # what it does there, such as "query"; outside the blocks the end of its name
    magnitude: float  # the estimate of its gradient's magnitude over all rows (PGM-EST)
    order: int | None  # when it was chosen, from 1


@dataclass(frozen=True)
class Chosen:
    """One selection of a run, and all that could be chosen, in the model's order."""

    parts: tuple[Part, ...]
    magnitude: str  # mg, mgn or mgna
    norm_order: int  # alpha
    noised: bool  # as they are in every private run


def read_chosen(folder: str) -> list[Chosen]:
    """Return the selections of a finished run, in their order.

    Raises: ConfigError for a folder without one, or with that of another method.
    """
    config = FrostConfig.from_pretrained(folder)
    if not config.made:
        raise ConfigError(
            f"Expected {FILE_NAME} in {folder!r} to hold a selection, got none. Name the output "
            "folder of a run with peft_type: frost that has ended."
        )
    try:
        return [_chosen(made, config) for made in config.made]
    except (KeyError, TypeError) as problem:
        raise ConfigError(
            f"{FILE_NAME} in {folder!r} lacks {problem}: another version of hf_dp wrote it. Use "
            "that version."
        ) from problem


def _chosen(made: Made, config: FrostConfig) -> Chosen:
    noised = "noisy_magnitudes" in made
    observed = made["noisy_magnitudes"] if noised else made["magnitudes_without_noise"]
    names = list(observed[0])
    table = np.array([[row.get(name, np.nan) for name in names] for row in observed])
    scales = made["sensitivities"] if noised else [1.0] * len(observed)
    magnitudes = estimate(table, scales, config.selection_sample_rate)
    orders = {name: place + 1 for place, name in enumerate(made["partitions"])}
    parts = [
        Part(name, block, kind, float(magnitude), orders.get(name))
        for (name, block, kind), magnitude in zip(_placed(names), magnitudes, strict=True)
    ]
    return Chosen(tuple(parts), config.magnitude, config.norm_order, noised)


def _placed(names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return each name with its block and its kind; kinds that a block has twice are numbered."""
    matches = [BLOCK.match(f"{name}.") for name in names]
    several = len({match[1] for match in matches if match}) > 1
    found: list[tuple[str, str, str]] = []
    for name, match in zip(names, matches, strict=True):
        if match is None:
            found.append((name, "", ".".join(name.split(".")[-2:])))
            continue
        local = name[match.end() :]
        kind = next((kind for kind, end in _ENDS.items() if end.match(local)), local)
        found.append((name, f"{match[1]} {match[2]}" if several else match[2], kind))
    counts = Counter((block, kind) for _, block, kind in found if block)
    twice = {kind for (_, kind), count in counts.items() if count > 1}
    seen: Counter[tuple[str, str]] = Counter()
    for place, (name, block, kind) in enumerate(found):
        if block and kind in twice:
            seen[block, kind] += 1
            found[place] = (name, block, f"{kind} {seen[block, kind]}")
    return found


def in_order(kinds: Sequence[str]) -> list[str]:
    """Return different kinds in the order of a block; those that are not known come last."""
    known = list(KINDS)

    def place(kind: str) -> tuple[int, str]:
        stem = kind.rstrip("0123456789 ")
        return (known.index(stem), kind) if stem in known else (len(known), "")

    return sorted(dict.fromkeys(kinds), key=place)
