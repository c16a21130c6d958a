"""The card and the evidence beside it, made together: README.md, and ``privacy.json`` with digests.

``privacy.json`` is written last, so that its digests are of what lies beside it. After a kill in
between, it belongs to no card yet, which ``hf-dp verify`` says; delete README.md, and ``hf-dp
card`` makes one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hf_dp.cards.card import privacy_head, render_card
from hf_dp.cards.details import CardDetails
from hf_dp.cards.verify import CARD, FAILED, checks_of_evidence, file_digests, is_as_made
from hf_dp.errors import LedgerError
from hf_dp.run.witnesses import refuse_foreign
from hf_dp.statement.digests import Beside, digest_of_text
from hf_dp.statement.durable import replace_file
from hf_dp.statement.record import FILE_NAME, read
from hf_dp.statement.statement import PrivacyStatement

if TYPE_CHECKING:
    from hf_dp.run.ledger import RunLedger


def write_card(
    folder: str | os.PathLike[str],
    statement: PrivacyStatement,
    details: CardDetails,
    book: RunLedger,
) -> None:
    """Write the card into a folder, and then the ``privacy.json`` of its run that vouches for it.

    Raises: as :func:`hf_dp.cards.card.render_card`; LedgerError for a folder of another run;
        OSError.
    """
    refuse_foreign(Path(folder), book.run_id)
    text = render_card(statement, details)
    os.makedirs(folder, exist_ok=True)
    replace_file(Path(folder, CARD), [text.encode()])
    book.save(folder, statement, _beside(text, details, file_digests(Path(folder))))


def _beside(card: str, details: CardDetails, files: Mapping[str, str]) -> Beside:
    section = digest_of_text(privacy_head(card) or "")
    return Beside(card=details.to_dict(), privacy_section=section, files=files)


def card_files(
    folder: str | os.PathLike[str],
    *,
    repository: str | None = None,
    given: Mapping[str, object] | None = None,
    replaced: Mapping[str, bytes] | None = None,
) -> dict[str, bytes]:
    """Return README.md and ``privacy.json`` of a saved run, made again and belonging together.

    Args:
        repository: the model's id on the Hub, for the lines that load it; None for none.
        given: fields of :class:`~hf_dp.cards.details.CardDetails` to set.
        replaced: bytes of configurations that are published instead of those in the folder.

    Raises:
        LedgerError: there is no ``privacy.json``; its run has not ended, or it does not belong to
            the weights beside it, or its claim does not follow from its ledger; or somebody edited
            the README.md there, which would be lost.
        InvalidArgumentError: ``given`` holds what a card does not have.
    """
    folder = Path(folder)
    record, path = read(folder), folder / CARD
    statement = record.restated()
    for check in checks_of_evidence(record, folder):
        if check.outcome == FAILED:
            raise LedgerError(
                f"The files in {folder} do not belong to {FILE_NAME} there: {check.words}. Resume "
                "the run to its end, take one of its checkpoints, or save the model again: "
                "trainer.save_model(), or hf_dp.save_run(mechanism) in a loop of your own."
            )
    if path.is_file() and not is_as_made(record, path.read_text("utf-8", errors="replace")):
        raise LedgerError(
            f"{path} was edited, or another version of hf_dp made it, and making it again would "
            "lose what it says. Say it by trainer.describe(...) or the options of `hf-dp card` "
            "(license, language, tags, ...), then delete the file: it is made anew."
        )
    details = CardDetails(model_name=folder.resolve().name)
    if record.card is not None:
        details = CardDetails.from_dict(record.card)
    details = replace(details.with_given(**dict(given or {})), repository=repository)
    text = render_card(statement, details)
    # A card may be kept without its weights, whose digests stay.
    files = {**record.files, **file_digests(folder)}
    files |= {
        name: hashlib.sha256(content).hexdigest()
        for name, content in (replaced or {}).items()
        if name in files
    }
    made = record.stating(statement, _beside(text, details, files))
    return {CARD: text.encode(), FILE_NAME: made.text().encode()}
