"""``hf-dp account``: privacy accounting from numbers, or of the ledger of a run."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from hf_dp.accounting import ACCOUNTANTS, RELATIONS
from hf_dp.accounting.value import doubt_of_delta
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
SEARCH_NOTE = """\
Epsilon of a hyperparameter search of which only the best run is released (Papernot and Steinke
2021, arXiv 2110.03620). The number of runs K is geometric, with the mean that you give. The noise,
sample rate and steps are those of one run, the most expensive one where they differ.

The figure describes a search only if all of this holds:
  - K was sampled secretly from the distribution, before the first run, and stays secret;
  - each run draws its hyperparameters independently from one distribution that was fixed
    beforehand: nothing is adaptive, and no run is stopped because of its score;
  - the score that selects the best run is computed on public data: the figure does not cover a
    score on private rows;
  - nothing of the other runs leaves, their number included.
Otherwise all runs compose: use `hf-dp sweep`, whose last line says what they cost together.
"""
_RATE, _END = "--sample-rate 0.0152044", "--steps 198 --delta 7.424e-6"
# question -> (help, words of the example, which number is not given)
QUESTIONS = {
    "epsilon": ("epsilon of a run", f"--noise-multiplier 0.8254 {_RATE} {_END}", "target-epsilon"),
    "noise": (
        "smallest noise that meets a target",
        f"--target-epsilon 3 {_RATE} {_END}",
        "noise-multiplier",
    ),
    "steps": (
        "largest number of steps that stays within a target",
        f"--target-epsilon 3 --noise-multiplier 0.8254 {_RATE} --delta 7.424e-6",
        "steps",
    ),
    "search": (
        "epsilon of a search over a secret number of runs that releases only the best",
        f"--mean-runs 10 --noise-multiplier 1.2 {_RATE} {_END}",
        "target-epsilon",
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
            description=SEARCH_NOTE if question == "search" else textwrap.fill(NOTE, 100),
            epilog=f"example{of}:\n  hf-dp account {question} {example}",
        )
        option = command.option
        if question == "ledger":
            option("path", "a privacy.json, or the folder that holds it", "PATH")
        else:
            for name, (kind, metavar, said) in NUMBERS.items():
                if name != wanted:
                    option(f"--{name}", said, metavar, required=True, type=kind)
        if question == "search":
            runs = "expected number of runs, from 1 to 10^9"
            option("--mean-runs", runs, "K", required=True, type=float)
        else:
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
    kinds = {"search": _search, "ledger": _ledger}
    delta, answers, found, lines = kinds.get(args.question, _of_a_run)(args)
    if args.json:
        results = [json_row(answer) for answer in answers]
        print(json.dumps({**found, "delta": delta, "results": results}, allow_nan=False))
    else:
        print("\n".join([*lines, table(answers, delta)]))
    return 0


def _of_a_run(args: argparse.Namespace) -> Found:
    """Answer about one run, of whose numbers one may be unknown."""
    from hf_dp import accounting
    from hf_dp.accounting.accountants import Answer, compare

    name, delta, lines = args.accountant or "pld", args.delta, ()
    if args.question == "noise":
        args.noise_multiplier = accounting.calibrate_noise_multiplier(
            args.target_epsilon, delta, args.sample_rate, args.steps, name
        )
        lines = (f"noise multiplier {args.noise_multiplier!r}",)
    elif args.question == "steps":
        args.steps = accounting.calibrate_steps(
            args.target_epsilon, delta, args.noise_multiplier, args.sample_rate, name
        )
        lines = (f"steps {args.steps!r} ({args.steps * args.sample_rate:.4g} epochs)",)
    event = accounting.PoissonSampledGaussian(args.noise_multiplier, args.sample_rate, args.steps)
    found: dict[str, object] = {"event": event.to_dict()}
    if args.question != "epsilon":
        return delta, compare(event, delta, (name,)), found, lines
    if args.cross_check:
        names = (args.accountant,) if args.accountant else ACCOUNTANTS
        answers = compare(event, delta, names, args.relation)
    else:  # what it cannot say is an error
        answers = (Answer(name, accounting.epsilon(event, delta, name, args.relation)),)
    return delta, answers, found | {"relation": args.relation}, lines


def _search(args: argparse.Namespace) -> Found:
    from hf_dp.accounting import BestOfRandomRuns, PoissonSampledGaussian, epsilon
    from hf_dp.accounting.accountants import Answer, compare
    from hf_dp.errors import UnsupportedEventError

    run = PoissonSampledGaussian(args.noise_multiplier, args.sample_rate, args.steps)
    search = BestOfRandomRuns((run,), args.mean_runs)
    answers = []
    for name in ACCOUNTANTS:
        with suppress(UnsupportedEventError):  # this accountant cannot describe a search
            answers.append(Answer(name, epsilon(search, args.delta, name)))
    one_run = compare(run, args.delta, [answer.accountant for answer in answers])
    found = {"event": search.to_dict(), "one_run": [json_row(answer) for answer in one_run]}
    lines = (
        f"one run:\n{table(one_run, args.delta)}",
        f"the best of K runs, K geometric with mean {args.mean_runs:g}:",
    )
    return args.delta, answers, found, lines


def _ledger(args: argparse.Namespace) -> Found:
    """Compute again what a run recorded."""
    from hf_dp.accounting.accountants import compare
    from hf_dp.run.witnesses import read_run
    from hf_dp.statement.record import disagreements
    from hf_dp.statement.wording import STATUSES

    record = read_run(args.path)
    said, verdict = None, "the run has not ended, so nothing is stated yet"
    if record.statement is not None:
        if problems := disagreements(record):
            raise LedgerError(
                "The statement does not follow from the file's own plan and ledger: "
                f"{'; '.join(problems)}. It was edited, or computed by another version of hf_dp. "
                "Do not rely on it."
            )
        said = record.statement["epsilon"]
        verdict = (
            "consistent: it follows from the plan and the ledger in this file, whoever wrote it"
        )
    every = args.cross_check and not args.accountant
    names = ACCOUNTANTS if every else [args.accountant or record.plan.accountant]
    answers = compare(record.ledger.events, record.plan.delta, names)
    rows = record.ledger.to_list()
    found = {"status": record.status, "verdict": verdict, "ledger": rows, "stated_epsilon": said}
    lines = [f"run {record.run_id}, status: {STATUSES[record.status]}"]
    for row in rows:
        fields = (f"{key} {value}" for key, value in row.items() if key not in ("type", "purpose"))
        lines.append(f"  {row['purpose']}: {row['type']}({', '.join(fields)})")
    lines.append(f"stated epsilon: {said}; {verdict}")
    return record.plan.delta, answers, found, lines


# -- answers; epsilon is rounded up ---


def json_row(answer: Answer) -> dict[str, str | float | None]:
    """Return an answer for JSON. An infinite epsilon is the string "inf"."""
    row: dict[str, str | float | None] = {"accountant": answer.accountant}
    if answer.epsilon is None:
        return row | {"kind": None, "epsilon": None, "error": answer.note}
    value = answer.epsilon.rounded_up(3)
    row |= {"kind": answer.epsilon.kind, "epsilon": value if math.isfinite(value) else "inf"}
    return row if answer.epsilon.estimate is None else row | {"estimate": answer.epsilon.estimate}


def table(answers: Iterable[Answer], delta: float) -> str:
    """Return a line for each accountant under a heading, and a warning of a large delta."""
    lines = [f"{'accountant':<11}{'kind':<10}epsilon at delta {delta:g}"]
    for answer in answers:
        found = answer.epsilon
        if found is None:
            lines.append(f"{answer.accountant:<11}{'-':<10}not computed: {answer.note}")
            continue
        point = "" if found.estimate is None else f"  (point estimate {found.estimate:.3f})"
        lines.append(f"{answer.accountant:<11}{found.kind:<10}{found.rounded_up(3):.3f}{point}")
    if doubt := doubt_of_delta(delta):
        lines.append(f"Warning: {doubt}")
    return "\n".join(lines)
