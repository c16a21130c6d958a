"""``hf-dp audit``: train a recipe with canaries in or out by coins, and try to refute its claim."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dp._arguments import own_fields
from hf_dp._validate import integer, one_of
from hf_dp.cli.config import read_yaml
from hf_dp.cli.launch import refuse_several
from hf_dp.cli.options import Parser, add_fields
from hf_dp.cli.tasks import DEFAULT_TASK, private_module
from hf_dp.errors import AuditError, ConfigError
from hf_dp.trainer.row_arguments import AuditArguments

if TYPE_CHECKING:
    from hf_dp.statement.audited import AuditResult

FILE_NAME = "leave_one_out.json"
RUN = """\
Train a recipe as `hf-dp train` does, with canaries among its rows, and try to refute its claim
(Steinke, Nasr and Jagielski 2023; Mahloujifar, Melis and Chaudhuri 2024). A secret coin puts each
canary in or leaves it out. After the run their scores are ordered, and the clearest are guessed.
Many right guesses bound epsilon from below. A bound that contradicts the claim is an error.

The canaries are made up. They count as rows, so a step of the same size has fewer real ones. What
they told stands in privacy.json and on the card; the coins are not kept.

Here audit_canaries is 1,000 unless it is given.
"""
RUN_EXAMPLES = """\
examples:
  hf-dp audit run --config recipes/demo/minilm_dp_adam.yaml
  hf-dp audit run --config recipes/demo/minilm_dp_adam.yaml --audit_canaries 200 \\
      --audit_scores losses
"""
LEAVE_ONE_OUT = """\
Train a small recipe many times, each time with one more row, made up, that a secret coin puts in or
leaves out, and guess from the noised gradients what the coin said. Nothing else interferes, so this
sees more than one audited run does, at the price of many runs. A result that contradicts the claim
is an error. Here audit_scores is directions unless it is given.

Each run is a release of the training rows, with the epsilon of the recipe. Audit with rows that may
be released, or count all runs.
"""
LEAVE_ONE_OUT_EXAMPLES = """\
examples:
  hf-dp audit leave-one-out --config recipes/demo/minilm_dp_adam.yaml --runs 60 --max_steps 10
"""


def main(argv: Sequence[str]) -> int:
    """Run one of the audits. Raises: AuditError when it refutes a claim; HfDpError."""
    refuse_several("hf-dp audit", "Start it without a launcher.")
    audits = {"run": _run, "leave-one-out": _leave_one_out}
    if argv and argv[0] in audits:
        return audits[argv[0]](list(argv[1:]))
    from hf_dp.cli import audit_exposure

    if argv and not argv[0].startswith("-"):
        one_of("audit", argv[0], ["exposure", *audits])
    return audit_exposure.main(argv)


def _parser(name: str, description: str, examples: str, only: Sequence[str]) -> Parser:
    """Return a parser of what an audit that trains a recipe is asked for."""
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
        metavar="FOLDER",
        help="default: that of the recipe, with the audit's name after it",
    )
    add_fields(parser, AuditArguments, only)
    return parser


def _recipe(args: argparse.Namespace, ending: str, **defaults: Any) -> dict[str, Any]:
    """Return the keys of a recipe for an audit. Raises: ConfigError for one without a folder."""
    values = {**read_yaml(args.config), **defaults}
    values |= {
        own.name: getattr(args, own.name)
        for own in own_fields(AuditArguments)
        if hasattr(args, own.name)
    }
    folder = args.output_dir
    if folder is None:
        if values.get("output_dir") is None:
            raise ConfigError(
                "Expected `output_dir`, beside which the audit's folder goes, got none."
            )
        top = Path(values["output_dir"])
        folder = str(top.with_name(f"{top.name}_{ending}"))
    return {**values, "output_dir": folder}


def _run(argv: list[str]) -> int:
    """Train with canaries; the last lines say what they told."""
    parser = _parser("run", RUN, RUN_EXAMPLES, ("audit_canaries", "audit_scores"))
    args, words = parser.parse_known_args(argv)
    values = _recipe(args, "audit", audit_canaries=1000)
    return private_module(values.get("task", DEFAULT_TASK)).train(values, words)


def _leave_one_out(argv: list[str]) -> int:
    """Train many times, guess, print what follows, and write :data:`FILE_NAME`."""
    parser = _parser("leave-one-out", LEAVE_ONE_OUT, LEAVE_ONE_OUT_EXAMPLES, ("audit_scores",))
    parser.add_argument("--runs", type=int, default=60, metavar="N", help="how many; 60 if unset")
    args, words = parser.parse_known_args(argv)
    values = _recipe(args, "leave_one_out", audit_scores="directions", save_strategy="no")
    values["audit_canaries"] = 1
    folder = Path(values["output_dir"])
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(
            f"The folder {folder.name!r} is not empty. An audit's coins are not kept, so it cannot "
            "go on: give a new --output_dir."
        )
    result, claim, reason = audit(values, words, integer("runs", args.runs, 10), folder)
    report = {"runs": args.runs, "claimed_epsilon": claim, **result.found()}
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
