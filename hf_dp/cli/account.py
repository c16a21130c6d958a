"""``hf-dp account``: privacy accounting from numbers, or of the record of a run."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from hf_dp.accounting import ACCOUNTANTS, RELATIONS
from hf_dp.accounting.events import RUN_DISTRIBUTIONS
from hf_dp.cli.answers import json_row, table
from hf_dp.cli.options import Parser
from hf_dp.errors import LedgerError

NOTE = (
    "These figures are for Poisson sampling with Gaussian noise on the sum of clipped gradients. A "
    "bound holds; an estimate may be below the true epsilon. Epsilon is rounded up."
)
_SST2 = "example (SST-2, 1024 of 67349 examples a step, 3 epochs):\n  hf-dp account "
_COMMON = "--steps 198 --delta 7.424e-6"
# question -> (help, example)
QUESTIONS = {
    "epsilon": (
        "epsilon of a run",
        f"epsilon --noise-multiplier 0.8254 --sample-rate 0.0152044 {_COMMON}",
    ),
    "noise": (
        "smallest noise that meets a target",
        f"noise --target-epsilon 3 --sample-rate 0.0152044 {_COMMON}",
    ),
    "steps": (
        "largest number of steps that stays within a target",
        "steps --target-epsilon 3 --noise-multiplier 0.8254 --sample-rate 0.0152044 --delta "
        "7.424e-6",
    ),
    "sample-rate": (
        "largest sample rate that stays within a target",
        f"sample-rate --target-epsilon 3 --noise-multiplier 0.8254 {_COMMON}",
    ),
    "search": (
        "epsilon of a search over a secret number of runs that releases only the best",
        f"search --mean-runs 10 --noise-multiplier 1.2 --sample-rate 0.0152044 {_COMMON}",
    ),
    "ledger": ("recompute what a finished or interrupted run cost", "ledger outputs/demo"),
}
SEARCH_NOTE = """\
Epsilon of a hyperparameter search of which only the best run is released (Papernot and Steinke
2021, arXiv 2110.03620). The number of runs K is random, with the mean that you give. The noise,
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


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all questions."""
    parser = Parser(
        "hf-dp account",
        description=NOTE,
    )
    commands = parser.add_subparsers(
        dest="question", required=True, metavar="{" + ",".join(QUESTIONS) + "}"
    )
    for question, (text, example) in QUESTIONS.items():
        before = "example:\n  hf-dp account " if question == "ledger" else _SST2
        add = commands.add_parser(
            question,
            help=text,
            description=SEARCH_NOTE if question == "search" else textwrap.fill(NOTE, 100),
            epilog=before + example,
        ).add_argument
        _add_numbers(question, add)
        if question == "search":
            _add_search(add)
        else:
            _add_accountant(question, add)
        add(
            "--json",
            action="store_true",
            help='one JSON object on stdout; an infinite epsilon is "inf"',
        )
    return parser


def _add_accountant(question: str, add: Callable[..., Any]) -> None:
    if question in ("epsilon", "ledger"):
        add(
            "--cross-check",
            action="store_true",
            help="every accountant with its kind, side by side",
        )
    default = "the run's own" if question == "ledger" else "pld"
    bounds = "" if question in ("epsilon", "ledger") else "; a bound: pld, rdp or prv"
    add("--accountant", choices=ACCOUNTANTS, help=f"which one (default: {default}{bounds})")
    if question == "epsilon":
        add(
            "--relation",
            choices=RELATIONS,
            default="zero_out",
            help="what a neighboring data set is (default: zero_out; replace_one only with pld)",
        )


def _add_search(add: Callable[..., Any]) -> None:
    add(
        "--mean-runs",
        type=float,
        required=True,
        metavar="K",
        help="expected number of runs, from 1 to 10^9",
    )
    add(
        "--distribution",
        choices=RUN_DISTRIBUTIONS,
        default=RUN_DISTRIBUTIONS[0],
        help="of the number of runs (default: truncated_negative_binomial, at least one run; with "
        "poisson there may be none, and nothing is released)",
    )
    add(
        "--shape",
        type=float,
        metavar="ETA",
        help="of the truncated negative binomial: 1 is the geometric distribution, 0 the "
        "logarithmic one (default: 1)",
    )


def _add_numbers(question: str, add: Callable[..., Any]) -> None:
    if question == "ledger":
        add("path", metavar="PATH", help="a privacy.json, or the folder that holds it")
        return
    options: dict[str, dict[str, Any]] = {
        "--noise-multiplier": {
            "type": float,
            "metavar": "SIGMA",
            "help": "noise standard deviation / clipping norm",
        },
        "--sample-rate": {
            "type": float,
            "metavar": "Q",
            "help": "probability that an example joins a step = expected batch size / number of "
            "examples",
        },
        "--steps": {"type": int, "metavar": "T", "help": "number of optimizer steps"},
        "--target-epsilon": {
            "type": float,
            "metavar": "EPSILON",
            "help": "epsilon to stay within, > 0",
        },
        "--delta": {"type": float, "help": "delta, for example 1 / (2 x number of examples)"},
    }
    wanted = {
        "epsilon": "--target-epsilon",
        "search": "--target-epsilon",
        "noise": "--noise-multiplier",
    }.get(question, f"--{question}")
    for name, settings in options.items():
        if name != wanted:
            add(name, required=True, **settings)


def main(argv: Sequence[str]) -> int:
    """Answer one question on stdout; return 2 (with a line on stderr) if there is no answer."""
    args = build_parser().parse_args(list(argv))
    answers: dict[str, Callable[[argparse.Namespace], int]] = {
        "epsilon": _epsilon,
        "search": _search,
        "ledger": _ledger,
    }
    return answers.get(args.question, _calibrated)(args)


def _epsilon(args: argparse.Namespace) -> int:
    from hf_dp.accounting import PoissonSampledGaussian, epsilon
    from hf_dp.accounting.accountants import Answer, compare

    event = PoissonSampledGaussian(args.noise_multiplier, args.sample_rate, args.steps)
    name = args.accountant or "pld"
    if args.cross_check:
        names = (args.accountant,) if args.accountant else ACCOUNTANTS
        answers = compare(event, args.delta, names, args.relation)
    else:
        answers = (Answer(name, epsilon(event, args.delta, name, args.relation)),)
    found = {"event": event.to_dict(), "delta": args.delta, "relation": args.relation}
    return _print(args, found, answers, "")


def _search(args: argparse.Namespace) -> int:
    from hf_dp.accounting import BestOfRandomRuns, PoissonSampledGaussian, epsilon
    from hf_dp.accounting.accountants import Answer, compare
    from hf_dp.errors import UnsupportedEventError

    run = PoissonSampledGaussian(args.noise_multiplier, args.sample_rate, args.steps)
    poisson = args.distribution == "poisson"
    shape = 1.0 if args.shape is None and not poisson else args.shape
    search = BestOfRandomRuns((run,), args.mean_runs, args.distribution, shape)
    answers = []
    for name in ACCOUNTANTS:
        with suppress(UnsupportedEventError):  # this accountant cannot describe a search
            answers.append(Answer(name, epsilon(search, args.delta, name)))
    one_run = compare(run, args.delta, [answer.accountant for answer in answers])
    found = {
        "event": search.to_dict(),
        "delta": args.delta,
        "one_run": [json_row(answer) for answer in one_run],
    }
    how = args.distribution.replace("_", " ") + ("" if poisson else f" of shape {shape:g}")
    heading = (
        f"one run:\n{table(one_run, args.delta)}\n"
        f"the best of K runs, K {how} with mean {args.mean_runs:g}:"
    )
    return _print(args, found, answers, heading)


def _calibrated(args: argparse.Namespace) -> int:
    from hf_dp import accounting
    from hf_dp.accounting.accountants import compare

    name = args.accountant or "pld"
    given = {"target_epsilon": args.target_epsilon, "target_delta": args.delta, "accountant": name}
    parts: dict[str, Any] = {
        key: getattr(args, key, None) for key in ("noise_multiplier", "sample_rate", "steps")
    }
    solve: dict[str, tuple[str, Callable[..., float]]] = {
        "noise": ("noise_multiplier", accounting.calibrate_noise_multiplier),
        "steps": ("steps", accounting.calibrate_steps),
        "sample-rate": ("sample_rate", accounting.calibrate_sample_rate),
    }
    unknown, calibrate = solve[args.question]
    parts[unknown] = calibrate(
        **given, **{key: value for key, value in parts.items() if key != unknown}
    )
    event = accounting.PoissonSampledGaussian(**parts)
    heading = f"{unknown.replace('_', ' ')} {parts[unknown]!r}"
    if unknown != "noise_multiplier":
        heading += f" ({event.steps * event.sample_rate:.4g} epochs)"
    found = {"event": event.to_dict(), "delta": args.delta}
    return _print(args, found, compare(event, args.delta, (name,)), heading)


def _ledger(args: argparse.Namespace) -> int:
    from hf_dp.accounting.accountants import compare
    from hf_dp.run.witnesses import read_run
    from hf_dp.statement.wording import STATUSES

    record = read_run(args.path)
    verdict = _verdict(record)
    name = args.accountant or record.plan.accountant
    names = ACCOUNTANTS if args.cross_check and not args.accountant else (name,)
    answers = compare(record.ledger.events, record.plan.delta, names)
    said = None if record.statement is None else record.statement["epsilon"]
    rows = record.ledger.to_list()
    found = {
        "status": record.status,
        "verdict": verdict,
        "ledger": rows,
        "delta": record.plan.delta,
        "stated_epsilon": said,
    }
    lines = [f"run {record.run_id}, status: {STATUSES[record.status]}", *map(_event_line, rows)]
    return _print(args, found, answers, "\n".join([*lines, f"stated epsilon: {said}; {verdict}"]))


def _verdict(record: Any) -> str:
    """Return whether the statement in the file follows from its ledger, computed now.

    Raises: LedgerError if it does not.
    """
    from hf_dp.statement.record import disagreements

    if record.statement is None:
        return "the run has not ended, so nothing is stated yet"
    if problems := disagreements(record):
        raise LedgerError(
            "The statement does not follow from the file's own plan and ledger: "
            f"{'; '.join(problems)}. It was edited, or computed by another version of hf_dp. Do "
            "not rely on it."
        )
    return "consistent: it follows from the plan and the ledger in this file, whoever wrote it"


def _event_line(row: dict[str, Any]) -> str:
    fields = ", ".join(
        f"{key} {value}" for key, value in row.items() if key not in ("type", "purpose")
    )
    return f"  {row['purpose']}: {row['type']}({fields})"


def _print(
    args: argparse.Namespace, found: dict[str, Any], answers: Iterable[Any], heading: str
) -> int:
    answers = list(answers)
    if args.json:
        print(
            json.dumps(
                {**found, "results": [json_row(answer) for answer in answers]}, allow_nan=False
            )
        )
    else:
        print("\n".join(filter(None, [heading, table(answers, found["delta"])])))
    return 0
