"""``hf-dp card DIR``: make the card of a saved run again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hf_dp._validate import invalid
from hf_dp.cards.details import SETTABLE, CardDetails
from hf_dp.cli.options import Parser, add_fields

DESCRIPTION = """\
Make README.md and privacy.json of a saved run again, from privacy.json. The options say what it
should hold. A README.md that was edited by hand is not overwritten: delete it first.
"""
EPILOG = """\
examples:
  hf-dp card outputs/demo --license apache-2.0 --language en
  hf-dp card outputs/demo --base-model FacebookAI/roberta-base --dataset nyu-mll/glue/sst2
"""


def main(argv: Sequence[str]) -> int:
    """Write both files."""
    parser = Parser("hf-dp card", description=DESCRIPTION, epilog=EPILOG)
    parser.option("folder", "a saved run, or one of its checkpoints", "DIR")
    add_fields(parser, CardDetails, ("repository", *SETTABLE))
    given = vars(parser.parse_args(list(argv)))
    from hf_dp.cards.details import is_repository
    from hf_dp.cards.verify import CARD, card_files
    from hf_dp.run.ledger_file import lock_run
    from hf_dp.statement.durable import replace_file

    folder, repository = Path(given.pop("folder")), given.pop("repository", None)
    if repository is not None and not is_repository(repository):
        expected = "to be a repository id like 'organization/name'"
        raise invalid("--repository", repository, expected, "Or leave it out.")
    lock = lock_run(folder) if folder.is_dir() else None  # a run that goes on writes these files
    try:
        for name, content in card_files(folder, repository=repository, given=given).items():
            replace_file(folder / name, [content])
    finally:
        if lock is not None:
            lock.release()
    print(folder / CARD)
    return 0
