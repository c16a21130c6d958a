"""``hf-dp inspect DIR`` and ``hf-dp publish DIR REPO``: what may leave, and one commit with it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from hf_dp.cli.options import Parser

if TYPE_CHECKING:
    from hf_dp.publishing.publication import Publication

INSPECT = """\
List which files of a run's folder `hf-dp publish` would put on the Hub, which stay here, and why.
Nothing is sent or written. The exit code is 1 when something keeps the folder from being published.
"""
PUBLISH = """\
Put a run on the Hub by one commit: weights or adapter, configuration, tokenizer, card and
privacy.json (see `hf-dp inspect`). The repository then holds exactly that. One that holds anything
but an earlier state of the same run is refused. With --to-folder the same files go into a folder.

The token is that of `hf auth login`, or HF_TOKEN. There is no option for it, since options end up
in histories and process lists.
"""


def _parser(command: str, description: str, *examples: str) -> Parser:
    """Return a parser with what both commands are told."""
    lines = [f"  hf-dp {command} {words}" for words in examples]
    epilog = "\n".join(["examples:", *lines])
    parser = Parser(f"hf-dp {command}", description=description, epilog=epilog)
    parser.option("folder", "a run's output folder, or one of its checkpoints", "DIR")
    base = "the Hub id of the base of an adapter that was trained on a local copy"
    parser.option("--base-model", base, "ID")
    parser.switch(
        "--not-private",
        "publish a run with insecure_seed, which no epsilon covers; its card says NOT PRIVATE",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Publish, and print the address or next step; return 2 (with a line on stderr) if refused."""
    parser = _parser(
        "publish",
        PUBLISH,
        "outputs/demo you/minilm-sst2-dp --private",
        "outputs/lora you/roberta-sst2-lora-dp --base-model FacebookAI/roberta-base",
        "outputs/demo --to-folder published/demo",
    )
    parser.option("repository", "you/model; created if it does not exist", "REPO", nargs="?")
    parser.option("--to-folder", "new or empty, to be filled instead, without the Hub", "FOLDER")
    who = "who may see a repository that is created (default: as your account's settings say)"
    parser.add_argument("--private", action=argparse.BooleanOptionalAction, help=who)
    parser.option("--revision", "created if it does not exist (default: main)", "BRANCH")
    parser.option("--message", "of the commit", "TEXT", default="Publish with hf_dp")
    args = parser.parse_intermixed_args(list(argv))  # REPO may follow an option
    from hf_dp.publishing.hub import publish

    done = publish(**vars(args))
    print(f"hf-dp verify {quote(str(done))}" if isinstance(done, Path) else done.commit_url)
    return 0


def inspect(argv: Sequence[str]) -> int:
    """Print what would be published; return 1 when the folder cannot be."""
    base = "outputs/lora --base-model FacebookAI/roberta-base --json"
    parser = _parser("inspect", INSPECT, "outputs/demo", base)
    parser.switch("--json", "one JSON object on stdout")
    args = parser.parse_args(list(argv))
    from hf_dp.publishing.publication import Publication

    found = Publication.of(args.folder, base_model=args.base_model, not_private=args.not_private)
    if args.json:
        report = {
            "folder": str(found.folder),
            "run_id": None if found.evidence is None else found.evidence.run_id,
            "claim": found.in_words(),
            "goes": dict(found.goes),
            "stays": dict(found.stays),
            "changes": list(found.changes),
            "refusals": list(found.refusals),
        }
        print(json.dumps(report, indent=2))
    else:
        print(_listing(found))
    return 1 if found.refusals else 0


def _listing(found: Publication) -> str:
    """Return what goes, what stays and what is refused, for people."""
    name = "" if found.evidence is None else f"run {found.evidence.run_id}: "
    lines = [f"{found.folder}: {name}{found.in_words()}"]
    goes = {path: f"{_size(found, path):>10}  {why}" for path, why in found.goes.items()}
    for title, rows in ((f"goes ({len(goes)} files)", goes), ("stays", found.stays)):
        if rows:
            width = max(map(len, rows))
            lines += [f"{title}:", *(f"  {key:<{width}}  {text}" for key, text in rows.items())]
    items = (("changed on the way", found.changes), ("REFUSED", found.refusals))
    for title, texts in items:
        if texts:
            lines += [f"{title}:", *(f"  - {text}" for text in texts)]
    return "\n".join(lines)


def _size(found: Publication, path: str) -> str:
    content = found.files[path]
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size} bytes"
