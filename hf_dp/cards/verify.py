"""Verify a published model: what it claims, against its own evidence.

What is recomputed here is whatever can be without the training rows: epsilon from the ledger, the
statement from epsilon, the card from the statement, and digests of the weights. Whether the ledger
tells what ran is for whoever signed it to say.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from hf_dp._version import __version__
from hf_dp.accounting import SELECTION, TRAINING
from hf_dp.cards.card import privacy_section, render_card, render_privacy
from hf_dp.cards.details import CardDetails
from hf_dp.cards.evidence import CARD, SELECTION_FILES, file_digests
from hf_dp.cards.metadata import KEY, metadata
from hf_dp.cards.signature import SIGNATURE, check
from hf_dp.errors import HfDpError, LedgerError
from hf_dp.run.mark import read_stamp
from hf_dp.run.weights_file import weights_files
from hf_dp.statement.digests import digest_of, digest_of_text
from hf_dp.statement.record import FILE_NAME, PrivacyRecord, file_of, read
from hf_dp.statement.schema import SCHEMA_VERSION
from hf_dp.statement.statement import PrivacyStatement
from hf_dp.statement.verify import disagreements
from hf_dp.statement.weaknesses import plain

OK, FAILED, NOT_CHECKED, NOTICE = "ok", "FAILED", "not checked", "notice"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        about: "plan and ledger", "weights", ...
        outcome: OK, FAILED, NOT_CHECKED (what it needs is not there) or NOTICE (worth knowing).
        words: what was found.
    """

    about: str
    outcome: str
    words: str


@dataclass(frozen=True)
class Report:
    """What was found of one model. Attributes: claim: its own sentence, or None if unreadable."""

    checks: tuple[Check, ...]
    claim: str | None

    @property
    def outcome(self) -> str:
        """FAILED if anything failed, else NOT_CHECKED if anything could not be checked, else OK."""
        found = {check.outcome for check in self.checks}
        return next((each for each in (FAILED, NOT_CHECKED) if each in found), OK)


def verify(
    folder: str | os.PathLike[str],
    *,
    allowed_signers: str | os.PathLike[str] | None = None,
    identity: str | None = None,
) -> Report:
    """Check a folder with a model, its card and its ``privacy.json``.

    Arguments are those of :func:`hf_dp.cards.signature.check`. Nothing raises for what is wrong
    with the files: the report has it.

    Raises: ConfigError for a signature where ssh-keygen is missing.
    """
    folder = Path(folder)
    try:
        record = read(folder)
        statement = _statement(record)
    except HfDpError as error:
        return Report((Check(FILE_NAME, FAILED, str(error)),), None)
    checks = [
        *_of_the_record(record),
        *_of_the_schedule(record, statement),
        *_of_the_weights(record, folder),
        *_of_the_card(record, statement, folder),
        _of_the_signature(folder, allowed_signers, identity),
    ]
    return Report(tuple(checks), statement.sentence())


def _statement(record: PrivacyRecord) -> PrivacyStatement:
    if record.statement is None:
        raise LedgerError(
            f"{FILE_NAME} has no statement: the run has not ended, or was killed. Nothing is "
            "claimed of these weights. Resume the run to its end, or take one of its checkpoints."
        )
    return PrivacyStatement.from_dict(record.statement)


def _of_the_record(record: PrivacyRecord) -> Iterator[Check]:
    about = "plan, ledger, statement"
    if record.digests is None:
        yield Check(
            about,
            NOTICE,
            f"{FILE_NAME} has no digests: an earlier version of hf_dp wrote it. `hf-dp card` adds "
            "them",
        )
    else:
        yield Check(about, OK, f"they are what was written: their digests in {FILE_NAME} agree")
    problems = disagreements(record)
    for problem in problems:
        yield Check("epsilon and statement", FAILED, problem)
    if not problems:
        assert record.statement is not None
        found = [
            f"{row['epsilon']:.3f} by {row['accountant']}"
            for row in record.statement["epsilons"]
            if row["epsilon"] is not None
        ]
        words = f"recomputed from the ledger: {', '.join(found)}" if found else "none is claimed"
        yield Check("epsilon and statement", OK, words)


def _of_the_schedule(record: PrivacyRecord, statement: PrivacyStatement) -> Iterator[Check]:
    plan, ledger, about = record.plan, record.ledger, "schedule"
    planned = {TRAINING: plan.steps if plan.releases_each_step else 0}
    planned[SELECTION] = 0 if plan.selection is None else plan.selection.event().steps
    ran = {purpose: ledger.steps(purpose) for purpose in planned}
    words = ", ".join(f"{ran[name]:,} of {planned[name]:,} steps of {name}" for name in planned)
    target = plan.target_epsilon
    if target is not None and statement.epsilon is not None and statement.epsilon > target + 1e-3:
        yield Check(about, FAILED, f"epsilon {statement.epsilon} is above the target {target}")
    elif ran == planned:
        yield Check(about, OK, f"{words}: as planned")
    else:
        yield Check(about, NOTICE, f"{words}: not as planned; the ledger is what counts")


def _of_the_weights(record: PrivacyRecord, folder: Path) -> Iterator[Check]:
    about = "weights"
    listed = {} if record.digests is None else record.digests.files
    present = file_digests(folder)
    for name, digest in listed.items():
        if name not in present:
            yield Check(about, NOT_CHECKED, f"{name} is not here")
        elif present[name] != digest:
            yield Check(about, FAILED, f"{name} is not what was saved: the SHA-256 differs")
        else:
            yield Check(about, OK, f"{name} is what was saved")
    for name in sorted(set(present) - set(listed)):
        outcome = NOTICE if record.digests is None else FAILED
        yield Check(about, outcome, f"nothing vouches for {name}: it has no digest in {FILE_NAME}")
    if not any(name not in SELECTION_FILES for name in (*listed, *present)):
        yield Check(about, NOT_CHECKED, "no weights are here, and none are listed")
    for path in weights_files(folder):
        try:
            mark = read_stamp(path)
        except LedgerError as error:
            yield Check(about, FAILED, str(error))
            continue
        if mark is None:
            continue
        if mark.run_id != record.run_id:
            yield Check(about, FAILED, f"{path.name} is of another run, {mark.run_id}")
        elif not record.ledger.extends(mark.ledger):
            yield Check(about, FAILED, f"{path.name} knows more steps than {FILE_NAME} beside it")


def _of_the_card(
    record: PrivacyRecord, statement: PrivacyStatement, folder: Path
) -> Iterator[Check]:
    about, path = "card", folder / CARD
    if not path.is_file():
        yield Check(about, NOT_CHECKED, f"{CARD} is not here")
        return
    try:
        text = path.read_text(encoding="utf-8")
        block = plain(ModelCard(text, ignore_metadata_errors=False).data.to_dict().get(KEY))
    except (OSError, ValueError) as error:
        yield Check(about, FAILED, f"{CARD} cannot be read: {error}")
        return
    section = privacy_section(text)
    current = _is_current(record, statement)
    made = plain(metadata(statement))
    if record.digests is None or record.digests.privacy_section is None:
        yield Check(about, NOTICE, f"{FILE_NAME} has no digest of a card; `hf-dp card` adds one")
    else:
        differs = digest_of_text(section or "") != record.digests.privacy_section
        yield _compared("its section Privacy", differs, "the digest")
        differs = digest_of(block) != record.digests.differential_privacy
        yield _compared(f"its {KEY} block", differs, "the digest")
    if current or record.digests is None:
        yield _compared(f"its {KEY} block", block != made, "the statement")
    if not current or record.card is None:
        return
    details, repository = CardDetails.from_dict(record.card), _repository(section or "")
    again = render_privacy(statement, details, repository)
    differs = digest_of_text(section or "") != digest_of_text(again)
    yield _compared("its section Privacy", differs, "the statement")
    whole = render_card(statement, details, repository=repository)
    if digest_of_text(whole) != digest_of_text(text):
        yield Check(about, NOTICE, "it was edited outside what is about privacy")


def _compared(what: str, differs: bool, with_what: str) -> Check:
    if differs:
        return Check("card", FAILED, f"{what} does not agree with {with_what} in {FILE_NAME}")
    return Check("card", OK, f"{what} agrees with {with_what}")


def _is_current(record: PrivacyRecord, statement: PrivacyStatement) -> bool:
    """Return whether this version wrote it, and so words it in the same way."""
    same = statement.facts.versions.get("hf_dp") == __version__
    return same and record.schema_version == SCHEMA_VERSION


def _repository(section: str) -> str | None:
    """Return the repository for which a card was made, as its own command names it."""
    found = re.search(r"`hf-dp verify ([^`\s]+)`", section)
    return None if found is None or found[1] == "THIS_FOLDER" else found[1]


def _of_the_signature(
    folder: Path, allowed_signers: str | os.PathLike[str] | None, identity: str | None
) -> Check:
    about, path = "signature", folder / SIGNATURE
    asked = allowed_signers is not None
    if not path.is_file():
        words = (
            "there is none: everything above agrees, and anyone who can write these files could "
            "have written them together"
        )
        return Check(about, FAILED if asked else NOTICE, words)
    found = check(file_of(folder).read_bytes(), path, allowed_signers, identity)
    if not found.good:
        return Check(about, FAILED, f"it is not one of this {FILE_NAME}: {found.words}")
    if not found.trusted:
        unknown = "whose key this is, is not known here; give --allowed-signers and --identity"
        return Check(about, NOTICE, f"{found.words}; {unknown}")
    return Check(about, OK, found.words)


def summary(report: Report) -> dict[str, Any]:
    """Return a report as plain data, JSON-ready."""
    return {
        "outcome": report.outcome,
        "claim": report.claim,
        "checks": [vars(each) for each in report.checks],
    }
