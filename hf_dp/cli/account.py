"""``hf-dp account``: privacy accounting from numbers, or of the ledger of a run."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hf_dp.accounting import ACCOUNTANTS, RELATIONS
from hf_dp.cli.options import Parser
from hf_dp.errors import LedgerError

if TYPE_CHECKING:
    from hf_dp.accounting.accountants import Answer

    # delta, the answers, what else stands in the JSON, and lines above the table
    Found = tuple[float, Sequence[Answer], dict[str, object], Sequence[str]]

NOTE = (
    "These figures are for Poisson sampling with Gaussian noise on the sum of clipped gradients. A "
    "bound holds; an estimate may be below the true epsilon. Epsilon is rounded up."
)
_RATE, _END = "--sample-rate 0.0152044", "--steps 198 --delta 7.424e-6"
# question -> (help, words of the example, which number is not given)
QUESTIONS = {
    "epsilon": ("epsilon of a run", f"--noise-multiplier 0.8254 {_RATE} {_END}", "target-epsilon"),
    "noise": (
        "smallest noise that meets a target",
        f"--target-epsilon 3 {_RATE} {_END}",
        "noise-multiplier",
    ),
    "ledger": ("recompute what a finished or interrupted run cost", "outputs/demo", ""),
}
NUMBERS = {
    "noise-multiplier": (float, "SIGMA", "noise standard deviation / clipping norm"),
    "sample-rate": (
        float,
        "Q",
        "probability that an example joins a step = expected batch size / number of examples",
    ),
    "steps": (int, "T", "number of optimizer steps"),
    "target-epsilon": (float, "EPSILON", "epsilon to stay within, > 0"),
    "delta": (float, "DELTA", "delta, for example 1 / (2 x number of examples)"),
}


def build_parser() -> Parser:
    """Return the parser of all questions."""
    parser = Parser("hf-dp account", description=NOTE)
    commands = parser.add_subparsers(
        dest="question", required=True, metavar="{" + ",".join(QUESTIONS) + "}"
    )
    for question, (text, example, wanted) in QUESTIONS.items():
        of = "" if question == "ledger" else " (SST-2, 1024 of 67349 examples a step, 3 epochs)"
        command = commands.add_parser(
            question,
            help=text,
            description=textwrap.fill(NOTE, 100),
            epilog=f"example{of}:\n  hf-dp account {question} {example}",
        )
        option = command.option
        if question == "ledger":
            option("path", "a privacy.json, or the folder that holds it", "PATH")
        else:
            for name, (kind, metavar, said) in NUMBERS.items():
                if name != wanted:
                    option(f"--{name}", said, metavar, required=True, type=kind)
        default = "the run's own" if question == "ledger" else "pld"
        option("--accountant", f"default: {default}", choices=ACCOUNTANTS)
        if question in ("epsilon", "ledger"):
            command.switch("--cross-check", "every accountant with its kind")
        if question == "epsilon":
            said = "what a neighboring data set is (default: zero_out; replace_one only with pld)"
            option("--relation", said, choices=RELATIONS, default="zero_out")
        command.switch("--json", 'one JSON object; an infinite epsilon is "inf"')
    return parser


def main(argv: Sequence[str]) -> int:
    """Answer one question on stdout; return 2 (with a line on stderr) if there is no answer."""
    args = build_parser().parse_args(list(argv))
    delta, answers, found, lines = (_ledger if args.question == "ledger" else _of_a_run)(args)
    if args.json:
        results = [json_row(answer) for answer in answers]
        print(json.dumps({**found, "delta": delta, "results": results}, allow_nan=False))
    else:
        from hf_dp.accounting.accountants import table

        print("\n".join([*lines, table(answers, delta)]))
    return 0


def _of_a_run(args: argparse.Namespace) -> Found:
    """Answer about a run of which all numbers are given but epsilon or the noise."""
    from hf_dp import accounting
    from hf_dp.accounting.accountants import Answer, compare

    name, delta, rate, steps = args.accountant or "pld", args.delta, args.sample_rate, args.steps
    if args.question == "noise":
        target = args.target_epsilon
        sigma = accounting.calibrate_noise_multiplier(target, delta, rate, steps, name)
        event = accounting.PoissonSampledGaussian(sigma, rate, steps)
        lines = (f"noise multiplier {sigma!r}",)
        return delta, compare(event, delta, (name,)), {"event": event.to_dict()}, lines
    event = accounting.PoissonSampledGaussian(args.noise_multiplier, rate, steps)
    answers: Sequence[Answer]
    if args.cross_check:
        names = (args.accountant,) if args.accountant else ACCOUNTANTS
        answers = compare(event, delta, names, args.relation)
    else:  # what it cannot say is an error
        answers = (Answer(name, accounting.epsilon(event, delta, name, args.relation)),)
    return delta, answers, {"event": event.to_dict(), "relation": args.relation}, ()


def _ledger(args: argparse.Namespace) -> Found:
    """Compute again what a run recorded."""
    from hf_dp.accounting.accountants import Answer, compare
    from hf_dp.run.witnesses import read_run
    from hf_dp.statement.evidence import disagreements
    from hf_dp.statement.wording import STATUSES

    evidence = read_run(args.path)
    said, verdict = None, "the run has not ended, so it claims nothing yet"
    if evidence.statement is not None:
        if problems := disagreements(evidence):
            raise LedgerError(
                "The statement does not follow from the file's own plan and ledger: "
                f"{'; '.join(problems)}. It was edited, or computed by another version of hf_dp. "
                "Do not rely on it."
            )
        said = evidence.statement["epsilon"]
        verdict = (
            "consistent: it follows from the plan and the ledger in this file, whoever wrote it"
        )
    every = args.cross_check and not args.accountant
    names = ACCOUNTANTS if every else [args.accountant or evidence.plan.accountant]
    answers = compare(evidence.ledger.events, evidence.plan.delta, names)
    if reason := evidence.no_epsilon:  # an accountant that has no answer says more
        answers = tuple(
            a if a.epsilon is None else Answer(a.accountant, None, reason) for a in answers
        )
    rows = evidence.ledger.to_list()
    found: dict[str, object] = {
        "status": evidence.status,
        "verdict": verdict,
        "ledger": rows,
        "stated_epsilon": said,
    }
    lines = [f"run {evidence.run_id}, status: {STATUSES[evidence.status]}"]
    for row in rows:
        fields = (f"{key} {value}" for key, value in row.items() if key not in ("type", "purpose"))
        lines.append(f"  {row['purpose']}: {row['type']}({', '.join(fields)})")
    lines.append(f"stated epsilon: {said}; {verdict}")
    return evidence.plan.delta, answers, found, lines


# -- answers; epsilon is rounded up ---


def json_row(answer: Answer) -> dict[str, str | float | None]:
    """Return an answer for JSON. An infinite epsilon is the string "inf"."""
    row: dict[str, str | float | None] = {"accountant": answer.accountant}
    if answer.epsilon is None:
        return row | {"kind": None, "epsilon": None, "error": answer.note}
    value = answer.epsilon.rounded_up(3)
    row |= {"kind": answer.epsilon.kind, "epsilon": value if math.isfinite(value) else "inf"}
    return row if answer.epsilon.estimate is None else row | {"estimate": answer.epsilon.estimate}
