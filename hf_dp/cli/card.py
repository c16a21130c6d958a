"""``hf-dp card DIR``: make the card of a saved run again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from hf_dp._validate import invalid
from hf_dp.cli.options import Parser

DESCRIPTION = """\
Make README.md and privacy.json of a saved run again, from privacy.json. The options say what it
should hold. A README.md that was edited by hand is not overwritten: delete it first.
"""
EPILOG = """\
examples:
  hf-dp card outputs/demo --license apache-2.0 --language en
  hf-dp card outputs/demo --base-model FacebookAI/roberta-base --dataset nyu-mll/glue/sst2
"""
_OPTIONS = {
    "model-name": "title of the card",
    "base-model": "its id on the Hub",
    "dataset": "its id on the Hub, else its name; with a configuration: nyu-mll/glue/sst2",
    "evaluation-split": "the split that the metrics were computed on, for example validation",
    "license": "as the Hub spells it: apache-2.0, mit, cc-by-4.0, ..., other",
    "license-name": "with --license other",
    "license-link": "with --license other",
    "task-tag": "the Hub's pipeline tag, for example text-classification",
    "recipe": "what trained it",
}
_LISTS = {"language": "ISO 639 codes", "tags": "tags to add"}


def main(argv: Sequence[str]) -> int:
    """Write both files."""
    parser = Parser("hf-dp card", description=DESCRIPTION, epilog=EPILOG)
    parser.option("folder", "a saved run, or one of its checkpoints", "DIR")
    for name, text in _OPTIONS.items():
        parser.option(f"--{name}", text, "TEXT")
    for name, text in _LISTS.items():
        parser.option(f"--{name}", text, "TEXT", nargs="+")
    where = "the model's id on the Hub, for the lines that load it"
    parser.option("--repository", where, "ID")
    args = parser.parse_args(list(argv))
    from hf_dp.cards.escaping import is_repository
    from hf_dp.cards.evidence import card_files
    from hf_dp.cards.verify import CARD
    from hf_dp.run.ledger_file import lock_run
    from hf_dp.statement.durable import replace_file
    from hf_dp.statement.record import FILE_NAME, write

    if args.repository is not None and not is_repository(args.repository):
        expected = "to be the id of a repository, like 'organization/name'"
        raise invalid("--repository", args.repository, expected, "Or leave it out.")
    names = [name.replace("-", "_") for name in (*_OPTIONS, *_LISTS)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    folder = Path(args.folder)
    lock = lock_run(folder) if folder.is_dir() else None  # a run that goes on writes these files
    try:
        files = card_files(folder, repository=args.repository, given=given)
        replace_file(folder / CARD, [files[CARD]])
        write(folder, json.loads(files[FILE_NAME]))
    finally:
        if lock is not None:
            lock.release()
    print(folder / CARD)
    return 0
