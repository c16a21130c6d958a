"""The card and the evidence beside it, made together: README.md, and ``privacy.json`` with digests.

``privacy.json`` is written last, so that its digests are of what lies beside it. After a kill in
between, it belongs to no card yet, which ``hf-dp verify`` says; delete README.md, and ``hf-dp
card`` makes one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_dp.cards.card import privacy_head, render_card, repository_of
from hf_dp.cards.details import CardDetails
from hf_dp.cards.metadata import metadata
from hf_dp.errors import LedgerError
from hf_dp.run.ledger_file import LEDGER, read_own
from hf_dp.run.weights_file import head_in, weights_files
from hf_dp.statement.digests import (
    Beside,
    digest_of,
    digest_of_bytes,
    digest_of_file,
    digest_of_text,
)
from hf_dp.statement.durable import replace_file
from hf_dp.statement.facts import RunFacts
from hf_dp.statement.record import FILE_NAME, PrivacyRecord, disagreements, read, to_record
from hf_dp.statement.statement import PrivacyStatement
from hf_dp.statement.weaknesses import plain

CARD = "README.md"
# What was chosen to train: as much a result of the private rows as the weights.
SELECTION_FILES = ("selection.json", "selection_masks.safetensors")
# They decide which weights are loaded, and what is computed with them.
CONFIGS = ("config.json", "adapter_config.json", "model.safetensors.index.json")

Save = Callable[[Beside], None]


def write_card(
    folder: str | os.PathLike[str],
    statement: PrivacyStatement,
    details: CardDetails,
    save: Save,
    *,
    repository: str | None = None,
) -> None:
    """Write the card into a folder, and then, by ``save``, the ``privacy.json`` that vouches for
    it.

    Raises: as :func:`hf_dp.cards.card.render_card` and ``save``; OSError.
    """
    text = render_card(statement, details, repository=repository)
    os.makedirs(folder, exist_ok=True)
    replace_file(Path(folder, CARD), [text.encode()])
    save(beside(folder, statement, details, text))


def beside(
    folder: str | os.PathLike[str],
    statement: PrivacyStatement,
    details: CardDetails,
    card: str,
    replaced: Mapping[str, bytes] | None = None,
) -> Beside:
    """Return the digests of a card and of the files in a folder; ``replaced`` as in
    :func:`file_digests`."""
    head = privacy_head(card)
    assert head is not None
    return Beside(
        details.to_dict(),
        {
            "privacy_section": digest_of_text(head),
            "differential_privacy": digest_of(plain(metadata(statement))),
        },
        file_digests(Path(folder), replaced),
    )


def file_digests(folder: Path, replaced: Mapping[str, bytes] | None = None) -> dict[str, str]:
    """Return the digests of what makes a model what it is: weights, selections and configurations,
    by their names relative to a folder.

    Args: replaced: bytes of files that are published instead of those in the folder.
    """
    paths = [*weights_files(folder), *(folder / name for name in (*SELECTION_FILES, *CONFIGS))]
    names = sorted(path.relative_to(folder).as_posix() for path in paths if path.is_file())
    given = dict(replaced or {})
    return {
        name: digest_of_bytes(given[name]) if name in given else digest_of_file(folder / name)
        for name in names
    }


def card_files(
    folder: str | os.PathLike[str],
    *,
    repository: str | None = None,
    given: Mapping[str, Any] | None = None,
    replaced: Mapping[str, bytes] | None = None,
) -> tuple[dict[str, bytes], list[str]]:
    """Return README.md and ``privacy.json`` of a saved run, made again and belonging together; and
    remarks on what the Hub will not show.

    Args:
        repository: the model's id on the Hub, for the lines that load it; None for none.
        given: fields of :class:`~hf_dp.cards.details.CardDetails` to set.
        replaced: bytes of configurations that are published instead of those in the folder.

    Raises:
        LedgerError: there is no ``privacy.json``; its run has not ended, or it does not belong to
            the weights beside it, or its statement does not follow from its ledger; or somebody
            edited the README.md there, which would be lost.
        InvalidArgumentError: ``given`` holds what the Hub would refuse.
    """
    folder = Path(folder)
    record = read(folder)
    _refuse_unfit(record, folder)
    _refuse_edited(record, folder / CARD)
    assert record.statement is not None
    # Stated again: an older version may have worded it differently, or bounded it more loosely.
    facts = RunFacts.from_dict(record.statement["facts"])
    statement = PrivacyStatement.from_ledger(record.plan, record.ledger, facts)
    details = CardDetails(model_name=folder.resolve().name)
    if record.card is not None:
        details = CardDetails.from_dict(record.card)
    details = details.with_given(**dict(given or {}))
    text = render_card(statement, details, repository=repository)
    document = to_record(
        record.plan,
        record.ledger,
        run_id=record.run_id,
        weaknesses=record.weaknesses,
        statement=statement,
        beside=_with_absent(beside(folder, statement, details, text, replaced), record),
        head=record.head,
    )
    written = json.dumps(document, indent=2, allow_nan=False) + "\n"
    return {CARD: text.encode(), FILE_NAME: written.encode()}, details.remarks()


def is_as_made(record: PrivacyRecord, card: str) -> bool:
    """Return whether a card is what this version of hf_dp made with a record: nobody edited it."""
    head = privacy_head(card)
    if head is None or record.statement is None or record.card is None or record.digests is None:
        return False
    if digest_of_text(head) != record.digests.privacy_section:
        return False
    statement = PrivacyStatement.from_dict(record.statement)
    details = CardDetails.from_dict(record.card)
    whole = render_card(statement, details, repository=repository_of(head), head=head)
    return digest_of_text(whole) == digest_of_text(card)


def _refuse_edited(record: PrivacyRecord, path: Path) -> None:
    if path.is_file() and not is_as_made(record, path.read_text("utf-8", errors="replace")):
        raise LedgerError(
            f"{path} was edited, or another version of hf_dp made it, and making it again would "
            "lose what it says. Say it by trainer.describe(...) or the options of `hf-dp card` "
            "(license, language, tags, ...), then delete the file: it is made anew."
        )


def _with_absent(found: Beside, record: PrivacyRecord) -> Beside:
    """Return what lies beside, with the digests of files that were saved and are not here: a card
    may be kept without its weights."""
    listed = {} if record.digests is None else record.digests.files
    return replace(found, files={**listed, **found.files})


def _refuse_unfit(record: PrivacyRecord, folder: Path) -> None:
    own = read_own(folder)
    if record.statement is None or (own is not None and own.head != record.head):
        raise LedgerError(
            f"The run in {folder} has not ended, or was killed: {FILE_NAME} does not state all "
            f"that its {LEDGER} counts, and the weights beside it may be older. Resume it to its "
            "end, or name one of its checkpoints, each of which has a statement of its own."
        )
    listed = {} if record.digests is None else record.digests.files
    if problems := disagreements(record):
        raise LedgerError(
            f"{folder / FILE_NAME} states what does not follow from it: {problems[0]}. Restore it "
            "from a backup, or save the model again with `trainer.save_model()`."
        )
    for path in weights_files(folder):
        head = head_in(path)
        if head is not None and head.run_id != record.run_id:
            raise LedgerError(
                f"{path} is of run {head.run_id}, and {FILE_NAME} beside it of run "
                f"{record.run_id}. Put each run's files into a folder of their own."
            )
        if head is not None and not record.knows(head):
            raise LedgerError(
                f"{path} was saved later than {FILE_NAME} beside it, which is an older one. Save "
                "the model again with `trainer.save_model()`."
            )
        if head is None and path.relative_to(folder).as_posix() not in listed:
            raise LedgerError(
                f"Nothing shows that {path} is of the run of {FILE_NAME} beside it: it names no "
                "run and has no digest there. Take it out of the folder, or save the "
                "model again: trainer.save_model(), or hf_dp.save_run(mechanism) in a loop of "
                "your own."
            )
    now = file_digests(folder)
    for name, digest in listed.items():
        if now.get(name, digest) != digest:
            raise LedgerError(
                f"{folder / name} is not what was saved with {FILE_NAME} (the SHA-256 differs). "
                "Save the model again with `trainer.save_model()`, or restore the file."
            )
    for name in SELECTION_FILES:
        if name in now and name not in listed:
            raise LedgerError(
                f"{folder / name} was not saved with {FILE_NAME} beside it, which does not account "
                "for it. Take it out of the folder."
            )
