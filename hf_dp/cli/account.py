"""``hf-dp account epsilon|noise``: privacy accounting from numbers alone."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

from hf_dp.cli.main import hyphenated
from hf_dp.errors import AccountingRangeError

# Repeated here so that --help need not import scipy; a test compares it with hf_dp.accounting.ACCOUNTANTS.
ACCOUNTANTS = ("pld", "rdp", "prv", "gdp_clt")

EPSILON_EXAMPLE = """example (SST-2, 1024 of 67349 examples a step, 3 epochs):
  hf-dp account epsilon --noise-multiplier 0.8254 --sample-rate 0.0152044 --steps 198 --delta 7.424e-6
"""
NOISE_EXAMPLE = """example (SST-2, 1024 of 67349 examples a step, 3 epochs):
  hf-dp account noise --target-epsilon 3 --sample-rate 0.0152044 --steps 198 --delta 7.424e-6
"""
NOTE = (
    "Poisson sampling, Gaussian noise on the sum of clipped gradients, one example replaced by nothing (zero-out). "
    "A bound holds; an estimate may be below the true epsilon. Epsilon is rounded up."
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of both sub-commands."""
    parser = argparse.ArgumentParser("hf-dp account", description=NOTE, allow_abbrev=False)
    commands = parser.add_subparsers(dest="question", required=True, metavar="{epsilon,noise}")

    raw = argparse.RawDescriptionHelpFormatter
    ask = commands.add_parser(
        "epsilon",
        help="epsilon of a run",
        description=NOTE,
        epilog=EPSILON_EXAMPLE,
        formatter_class=raw,
        allow_abbrev=False,
    )
    ask.add_argument(
        "--noise-multiplier",
        type=float,
        required=True,
        metavar="SIGMA",
        help="noise standard deviation / clipping norm",
    )
    _common(ask)
    ask.add_argument("--accountant", choices=ACCOUNTANTS, help="only this one (default: all, each with its kind)")

    find = commands.add_parser(
        "noise",
        help="smallest noise that meets a target",
        description=NOTE,
        epilog=NOISE_EXAMPLE,
        formatter_class=raw,
        allow_abbrev=False,
    )
    find.add_argument(
        "--target-epsilon", type=float, required=True, metavar="EPSILON", help="epsilon to stay within, > 0"
    )
    _common(find)
    find.add_argument(
        "--accountant", choices=ACCOUNTANTS, default="pld", help="a bound: pld, rdp or prv (default: pld)"
    )
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sample-rate",
        type=float,
        required=True,
        metavar="Q",
        help="probability that an example joins a step = expected batch size / number of examples",
    )
    parser.add_argument("--steps", type=int, required=True, metavar="T", help="number of optimizer steps")
    parser.add_argument("--delta", type=float, required=True, help="delta, for example 1 / (2 x number of examples)")
    parser.add_argument("--json", action="store_true", help='one JSON object on stdout; an infinite epsilon is "inf"')


def main(argv: Sequence[str]) -> int:
    """Answers one question on stdout; exit code 2 (and a line on stderr) for what cannot be answered."""
    args = build_parser().parse_args(hyphenated(argv))
    return _epsilon(args) if args.question == "epsilon" else _noise(args)


def _epsilon(args: argparse.Namespace) -> int:
    from hf_dp.accounting import PoissonSampledGaussian, epsilon

    event = PoissonSampledGaussian(args.noise_multiplier, args.sample_rate, args.steps)
    rows: list[dict[str, Any]] = []
    for name in [args.accountant] if args.accountant else ACCOUNTANTS:
        try:
            rows.append({"accountant": name, **_result(epsilon(event, args.delta, name))})
        except AccountingRangeError as error:
            if args.accountant:
                raise
            rows.append({"accountant": name, "kind": None, "epsilon": None, "error": str(error)})
    if args.json:
        print(json.dumps({"event": event.to_dict(), "delta": args.delta, "results": rows}, allow_nan=False))
    else:
        print(_table(rows, args.delta))
    return 0


def _noise(args: argparse.Namespace) -> int:
    from hf_dp.accounting import PoissonSampledGaussian, calibrate_noise_multiplier, epsilon

    sigma = calibrate_noise_multiplier(args.target_epsilon, args.delta, args.sample_rate, args.steps, args.accountant)
    event = PoissonSampledGaussian(sigma, args.sample_rate, args.steps)
    row = {"accountant": args.accountant, **_result(epsilon(event, args.delta, args.accountant))}
    if args.json:
        print(json.dumps({"event": event.to_dict(), "delta": args.delta, "results": [row]}, allow_nan=False))
    else:
        print(f"noise multiplier {sigma!r}")
        print(_table([row], args.delta))
    return 0


def _result(result: Any) -> dict[str, Any]:
    """An Epsilon as JSON: rounded up, as everywhere it is printed."""
    value = result.rounded_up(3)
    row = {"kind": result.kind, "epsilon": value if math.isfinite(value) else "inf"}
    return row if result.estimate is None else {**row, "estimate": result.estimate}


def _table(rows: list[dict[str, Any]], delta: float) -> str:
    lines = [f"{'accountant':<11}{'kind':<10}epsilon at delta {delta:g}"]
    for row in rows:
        if row["epsilon"] is None:
            lines.append(f"{row['accountant']:<11}{'-':<10}not computed: {row['error']}")
            continue
        text = row["epsilon"] if isinstance(row["epsilon"], str) else f"{row['epsilon']:.3f}"
        point = f"  (point estimate {row['estimate']:.3f})" if "estimate" in row else ""
        lines.append(f"{row['accountant']:<11}{row['kind']:<10}{text}{point}")
    return "\n".join(lines)
