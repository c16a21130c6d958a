"""``hf-dp audit leave-one-out``: train a small recipe many times, with one canary in or out."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dp._validate import integer
from hf_dp.cli.audit_run import beside, parser_of
from hf_dp.cli.config import read_yaml
from hf_dp.cli.launch import refuse_several
from hf_dp.cli.tasks import DEFAULT_TASK, private_module
from hf_dp.errors import AuditError, ConfigError

if TYPE_CHECKING:
    from hf_dp.statement.audited import AuditResult

FILE_NAME = "leave_one_out.json"
DESCRIPTION = """\
Train a small recipe many times, each time with one more row, made up, that a secret coin puts in or
leaves out, and guess from the noised gradients what the coin said. Nothing else interferes, so this
sees more than one audited run does, at the price of many runs. A result that contradicts the claim
is an error.

Each run is a release of the training rows, with the epsilon of the recipe. Audit with rows that may
be released, or count all runs.
"""
EXAMPLES = """\
examples:
  hf-dp audit leave-one-out --config recipes/demo/minilm_dp_adam.yaml --runs 60 --max_steps 10
"""
RUNS = 60


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the options that an audit adds to those of ``hf-dp train``."""
    parser = parser_of("leave-one-out", DESCRIPTION, EXAMPLES)
    add = parser.add_argument
    add("--runs", type=int, default=RUNS, metavar="N", help=f"how many runs; {RUNS} if unset")
    add(
        "--scores",
        default="directions",
        help="what tells of the canary: directions (the noised gradients along its own), gradients "
        "(the canary is one coordinate) or losses (before and after)",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Train, guess, print what follows, and write :data:`FILE_NAME`.

    Raises: AuditError when the guesses refute the claim.
    """
    args, words = build_parser().parse_known_args(list(argv))
    refuse_several("hf-dp audit", "Start it without a launcher.")
    values: dict[str, Any] = read_yaml(args.config)
    folder = Path(args.output_dir or beside(values.get("output_dir"), "leave_one_out"))
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(
            f"The folder {folder.name!r} is not empty. An audit's coins are not kept, so it cannot "
            "go on: give a new --output-dir."
        )
    values |= {"audit_canaries": 1, "audit_scores": args.scores, "save_strategy": "no"}
    result, claim, reason = audit(values, words, integer("runs", args.runs, 10), folder)
    report = {"runs": args.runs, "claimed_epsilon": claim, **asdict(result)}
    (folder / FILE_NAME).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"claimed: epsilon {claim:.3f} at delta {result.delta:g}, in each of {args.runs} runs")
    print(f"audit:   {result.in_words()}")
    print(folder / FILE_NAME)
    if reason:
        raise AuditError(
            f"The recipe is not as private as it claims: {reason}. Do not publish its models. If "
            "you changed how rows are drawn, clipped or noised, look there first; if not, please "
            f"report it, with {FILE_NAME} and a privacy.json."
        )
    return 0


def audit(
    values: dict[str, Any], words: Sequence[str], runs: int, folder: Path
) -> tuple[AuditResult, float, str]:
    """Return what many runs tell of one canary, the epsilon that each claims, and, if the guesses
    refute it, why."""
    import numpy as np

    from hf_dp.features.canaries import audit_of
    from hf_dp.features.one_run_audit import guess

    module = private_module(values.get("task", DEFAULT_TASK))
    outcomes, claims = [], []
    for number in range(runs):
        trainer = module.trainer_of(
            {**values, "output_dir": str(folder / f"run_{number}")}, list(words)
        )
        trainer.train()
        outcomes.append(audit_of(trainer.run).outcome)
        claims.append((trainer.epsilon().value, trainer.ledger, trainer.privacy_plan))
        print(f"run {number + 1} of {runs}", flush=True)
    # An empty draw or an early end can make one run claim less; what is refuted is the largest.
    epsilon, ledger, plan = max(claims, key=lambda claim: claim[0])
    scores, took_part = (np.array(each) for each in zip(*outcomes, strict=True))
    result = guess(values["audit_scores"], scores, took_part, epsilon, plan.delta)
    accountant = plan.accountant if plan.accountant != "gdp_clt" else "pld"
    return result, epsilon, result.refutation(epsilon, ledger.events, accountant)
