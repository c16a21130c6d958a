"""``hf-dp verify MODEL``: what a model claims, against its own evidence."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from hf_dp.cli.options import Parser
from hf_dp.errors import ConfigError

DESCRIPTION = """\
Check a published model, or a folder: compute epsilon again by every accountant, compare the card
with the statement, the statement with the ledger, and the weights with their digests. It needs no
GPU and none of the training rows.
"""
EPILOG = """\
exit codes: 0 all agrees; 1 something does not; 2 wrong arguments; 3 something is missing and was
not checked.

examples:
  hf-dp verify outputs/demo
  hf-dp verify ORGANIZATION/MODEL
"""
EXIT_FAILED, EXIT_NOT_CHECKED = 1, 3
# Of a repository everything is fetched: weights that nothing vouches for are found, too.
_WEIGHTS = ("*.safetensors",)


class _Pitfalls(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(resources.files("hf_dp.statement").joinpath("README.md").read_text(encoding="utf-8"))
        parser.exit()


def main(argv: Sequence[str]) -> int:
    """Print the report; return 0, 1 or 3, as the help has it."""
    parser = Parser("hf-dp verify", description=DESCRIPTION, epilog=EPILOG)
    parser.option("model", "a folder, or a repository on the Hub", "MODEL")
    pitfalls = "print what no epsilon covers, and exit"
    parser.add_argument("--pitfalls", action=_Pitfalls, nargs=0, help=pitfalls)
    parser.option("--revision", "of the repository: a branch, tag or commit", "NAME")
    parser.switch("--skip-weights", "do not fetch the weights from the Hub")
    parser.switch("--json", "one JSON object on stdout")
    args = parser.parse_args(list(argv))
    from hf_dp.cards.verify import FAILED, NOT_CHECKED, OK, verify

    folder = fetched(args.model, args.revision, _WEIGHTS if args.skip_weights else ())
    report = verify(folder)
    if args.json:
        print(json.dumps(report.to_dict(), indent=1))
    else:
        for check in report.checks:
            print(f"{check.outcome:<12} {check.about}: {check.words}")
        said = {OK: "verified", FAILED: "NOT verified", NOT_CHECKED: "not fully checked"}
        print(f"\n{said[report.outcome]}: {report.claim or 'nothing is claimed'}")
    return {OK: 0, FAILED: EXIT_FAILED, NOT_CHECKED: EXIT_NOT_CHECKED}[report.outcome]


def fetched(model: str, revision: str | None = None, skipped: Sequence[str] = ()) -> Path:
    """Return the folder of a model, fetched, without ``skipped``, if it is not here."""
    path = Path(model)
    if path.is_dir():
        return path
    from hf_dp.cards.details import is_repository

    if not is_repository(model):
        raise ConfigError(
            f"Expected MODEL to be a folder or a repository like 'organization/name', got "
            f"{model!r}."
        )
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(model, revision=revision, ignore_patterns=list(skipped))
    except (OSError, ValueError) as error:  # the Hub's errors are OSErrors
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{model!r} is no local folder, and cannot be fetched from the Hub: {reason} For a "
            "private or gated repository set HF_TOKEN or run `hf auth login`."
        ) from None
    print(f"commit {Path(found).name} of {model}", file=sys.stderr)
    return Path(found)
