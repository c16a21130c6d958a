"""``hf-dp inspect DIR``: what would be published, what stays and why."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_dp.cli.options import Parser

if TYPE_CHECKING:
    from hf_dp.publishing.publication import Publication

DESCRIPTION = (
    "List which files of a run's folder `hf-dp publish` would put on the Hub, which stay here, and "
    "why. Nothing is sent or written. The exit code is 1 when something keeps the folder from "
    "being published."
)
EXAMPLES = """examples:
  hf-dp inspect outputs/demo
  hf-dp inspect outputs/lora --base-model FacebookAI/roberta-base --json
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = Parser(
        "hf-dp inspect",
        description=textwrap.fill(DESCRIPTION, 100),
        epilog=EXAMPLES,
    )
    add_common(parser.add_argument)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser


def add_common(add: Callable[..., Any]) -> None:
    """Add what ``inspect`` and ``publish`` share."""
    add("folder", metavar="DIR", help="a run's output folder, or one of its checkpoints")
    add(
        "--base-model",
        metavar="ID",
        help="the Hub id of the base of an adapter that was trained on a local copy",
    )
    add(
        "--not-private",
        action="store_true",
        help="publish what no epsilon covers, as what it is: a run with insecure_seed, whose card "
        "says NOT PRIVATE",
    )


def main(argv: Sequence[str]) -> int:
    """Print the list; return 1 when the folder cannot be published."""
    args = build_parser().parse_args(list(argv))
    from hf_dp.publishing.publication import Publication

    found = Publication.of(args.folder, base_model=args.base_model, not_private=args.not_private)
    print(json.dumps(_plain(found), indent=2) if args.json else listing(found))
    return 1 if found.refusals else 0


def listing(found: Publication) -> str:
    """Return what goes, what stays and what is refused, for people."""
    name = "" if found.record is None else f"run {found.record.run_id}: "
    goes = {path: f"{_size(found, path):>10}  {why}" for path, why in found.goes.items()}
    blocks = [
        f"{found.folder}: {name}{found.in_words()}",
        _block(f"goes ({len(goes)} files, {_bytes(found.size)})", goes),
        _block("stays", found.stays),
        _items("changed on the way", found.changes),
        _items("REFUSED", found.refusals),
    ]
    return "\n".join(block for block in blocks if block)


def _block(title: str, rows: Mapping[str, str]) -> str:
    if not rows:
        return ""
    width = max(map(len, rows))
    return "\n".join([f"{title}:", *(f"  {key:<{width}}  {text}" for key, text in rows.items())])


def _items(title: str, texts: Sequence[str]) -> str:
    return "\n".join([f"{title}:", *(f"  - {text}" for text in texts)]) if texts else ""


def _size(found: Publication, path: str) -> str:
    content = found.files[path]
    return _bytes(len(content) if isinstance(content, bytes) else content.stat().st_size)


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _plain(found: Publication) -> dict[str, Any]:
    return {
        "folder": str(found.folder),
        "run_id": None if found.record is None else found.record.run_id,
        "claim": found.in_words(),
        "goes": dict(found.goes),
        "stays": dict(found.stays),
        "changes": list(found.changes),
        "refusals": list(found.refusals),
    }
