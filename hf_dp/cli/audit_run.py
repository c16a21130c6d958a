"""``hf-dp audit run``: train a recipe with canaries in or out by coins, and bound epsilon from
below."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_dp.cli.config import read_yaml
from hf_dp.cli.launch import refuse_several
from hf_dp.cli.options import Parser
from hf_dp.cli.tasks import DEFAULT_TASK, private_module
from hf_dp.errors import ConfigError

DESCRIPTION = """\
Train a recipe as `hf-dp train` does, with canaries among its rows, and try to refute its claim
(Steinke, Nasr and Jagielski 2023; Mahloujifar, Melis and Chaudhuri 2024). A secret coin puts each
canary in or leaves it out. After the run their scores are ordered, and the clearest are guessed.
Many right guesses bound epsilon from below. A bound that contradicts the claim is an error.

The canaries are made up. They count as rows, so a step of the same size has fewer real ones. What
they told stands in privacy.json and on the card; the coins are not kept.
"""
EXAMPLES = """\
examples:
  hf-dp audit run --config recipes/demo/minilm_dp_adam.yaml
  hf-dp audit run --config recipes/demo/minilm_dp_adam.yaml --canaries 200 --scores losses
"""
CANARIES = 1000


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the options that an audit adds to those of ``hf-dp train``."""
    parser = parser_of("run", DESCRIPTION, EXAMPLES)
    add = parser.add_argument
    add(
        "--canaries",
        type=int,
        default=CANARIES,
        metavar="N",
        help=f"how many canaries join the rows; {CANARIES:,} if unset",
    )
    add(
        "--scores",
        default="gradients",
        help="what tells of them: gradients (the noised sums of all steps; a canary is one "
        "coordinate), directions (the same, of rows' own gradients; slow) or losses (before and "
        "after)",
    )
    return parser


def parser_of(name: str, description: str, examples: str) -> argparse.ArgumentParser:
    """Return a parser of what all audits that train a recipe are asked for."""
    parser = Parser(
        f"hf-dp audit {name}",
        usage=f"hf-dp audit {name} --config FILE [--NAME VALUE ...]",
        description=description,
        epilog=examples,
    )
    add = parser.add_argument
    add("--config", metavar="FILE", help="the recipe, as `hf-dp train` reads it", required=True)
    add(
        "--output-dir",
        "--output_dir",
        metavar="FOLDER",
        help="default: that of the recipe, with the audit's name after it",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Train with canaries; the last lines say what they told.

    Raises: AuditError when they refute the claim; HfDpError for what cannot be audited.
    """
    args, words = build_parser().parse_known_args(list(argv))
    refuse_several("hf-dp audit", "Start it without a launcher.")
    values: dict[str, Any] = read_yaml(args.config)
    values |= {"audit_canaries": args.canaries, "audit_scores": args.scores}
    values["output_dir"] = args.output_dir or beside(values.get("output_dir"), "audit")
    return private_module(values.get("task", DEFAULT_TASK)).train(values, words)


def beside(output_dir: str | None, name: str) -> str:
    """Return the folder beside a recipe's. Raises: ConfigError for a recipe without one."""
    if output_dir is None:
        raise ConfigError("Expected `output_dir`, beside which the audit's folder goes, got none.")
    top = Path(output_dir)
    return str(top.with_name(f"{top.name}_{name}"))
