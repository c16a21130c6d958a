"""``hf-dp publish DIR REPO``: one commit with what may leave, and nothing else."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence

from hf_dp.cli.inspect import add_common
from hf_dp.cli.options import Parser

DESCRIPTION = (
    "Put a run on the Hub by one commit: weights or adapter, configuration, tokenizer, card and "
    "privacy.json (see `hf-dp inspect`). The repository then holds exactly that. One that holds "
    "anything but an earlier state of the same run is refused.",
    "The token is that of `hf auth login`, or HF_TOKEN. There is no option for it, since options "
    "end up in histories and process lists.",
)
EXAMPLES = """examples:
  hf-dp publish outputs/demo you/minilm-sst2-dp --private
  hf-dp publish outputs/lora you/roberta-sst2-lora-dp --base-model FacebookAI/roberta-base
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = Parser(
        "hf-dp publish",
        description="\n\n".join(textwrap.fill(part, 100) for part in DESCRIPTION),
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    add_common(add)
    add("repository", metavar="REPO", help="you/model; made unless it is there")
    add(
        "--private",
        action=argparse.BooleanOptionalAction,
        help="who may see a repository that is made (default: what your account's settings say)",
    )
    add("--revision", metavar="BRANCH", help="made unless it is there (default: main)")
    add("--message", metavar="TEXT", default="Publish with hf_dp", help="of the commit")
    return parser


def main(argv: Sequence[str]) -> int:
    """Publish, and print the commit's address; return 2 (with a line on stderr) when refused."""
    args = build_parser().parse_args(list(argv))
    from hf_dp.publishing.hub import publish

    done = publish(
        args.folder,
        args.repository,
        private=args.private,
        base_model=args.base_model,
        revision=args.revision,
        not_private=args.not_private,
        message=args.message,
    )
    print(done.commit_url)
    return 0
