"""Verify a published model: what it claims, against its own evidence.

What is recomputed here is whatever can be without the training rows: epsilon from the ledger, the
statement from epsilon, the card from the statement, and digests of the weights. Whether the ledger
tells what ran is for whoever published it to say.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_dp._version import __version__
from hf_dp.accounting import SELECTION, TRAINING
from hf_dp.cards.card import privacy_head, render_head, repository_of
from hf_dp.cards.details import CardDetails
from hf_dp.cards.evidence import CARD, file_digests, is_as_made
from hf_dp.cards.metadata import KEY, front_matter, metadata
from hf_dp.errors import HfDpError, LedgerError
from hf_dp.run.ledger_file import LEDGER, read_own
from hf_dp.run.weights_file import head_in, weights_files
from hf_dp.statement.digests import digest_of, digest_of_text
from hf_dp.statement.record import FILE_NAME, PrivacyRecord, disagreements, read
from hf_dp.statement.statement import PrivacyStatement
from hf_dp.statement.weaknesses import plain

_WEIGHTS = re.compile(
    r"\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|gguf|onnx|npz|npy|pkl|pickle|joblib|tflite|ot)$",
    re.IGNORECASE,
)
# What hf_dp and Trainer keep in the folder of a run, which no program loads as a model.
_STATE = re.compile(
    r"training_args\.bin|(optimizer|scheduler|scaler)(_\d+)?\.(pt|bin)|rng_state(_\d+)?\.pth"
    r"|_(released_rows|prompt_weights)\.safetensors"
)
_OF_A_RUN = re.compile(r"checkpoint-\d+|_saving|\.git|\.cache|runs")
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


def verify(folder: str | os.PathLike[str]) -> Report:
    """Check a folder with a model, its card and its ``privacy.json``.

    Nothing raises for what is wrong with the files: the report has it.
    """
    folder = Path(folder)
    try:
        record = read(folder)
        statement = _statement(record)
        claim = statement.sentence()
    except (HfDpError, TypeError, ValueError, KeyError, AttributeError) as error:
        return Report((Check(FILE_NAME, FAILED, f"it cannot be read: {error}"),), None)
    looks: tuple[tuple[str, Callable[[], Iterable[Check]]], ...] = (
        ("statement", lambda: _of_the_record(record)),
        ("ledger", lambda: _of_the_ledger(record, folder)),
        ("schedule", lambda: _of_the_schedule(record, statement)),
        ("weights", lambda: _of_the_files(record, folder)),
        ("card", lambda: _of_the_card(record, statement, folder)),
        ("author", _of_the_author),
    )
    checks = [each for about, look in looks for each in _looked(about, look)]
    return Report(tuple(checks), claim)


def _looked(about: str, look: Callable[[], Iterable[Check]]) -> list[Check]:
    """Return what was found. What cannot be looked at, whatever is wrong with it, has failed."""
    try:
        return list(look())
    except Exception as error:  # files of strangers may hold anything
        return [Check(about, FAILED, f"it cannot be read: {type(error).__name__}: {error}")]


def _statement(record: PrivacyRecord) -> PrivacyStatement:
    if record.statement is None:
        raise LedgerError(
            f"{FILE_NAME} has no statement: the run has not ended, or was killed. Nothing is "
            "claimed of these weights. Resume the run to its end, or take one of its checkpoints."
        )
    return PrivacyStatement.from_dict(record.statement)


def _of_the_record(record: PrivacyRecord) -> Iterator[Check]:
    about = "plan, ledger, statement"
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


def _of_the_ledger(record: PrivacyRecord, folder: Path) -> Iterator[Check]:
    """Compare with the run's own ledger, where it is here, in the run's own folder."""
    own = read_own(folder)
    if own is not None and own.head != record.head:
        yield Check("ledger", FAILED, f"the run's {LEDGER} is not the one that {FILE_NAME} adds up")


def _of_the_schedule(record: PrivacyRecord, statement: PrivacyStatement) -> Iterator[Check]:
    plan, ledger, about = record.plan, record.ledger, "schedule"
    planned = {TRAINING: plan.steps_recorded if plan.releases_each_step else 0}
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


def _of_the_files(record: PrivacyRecord, folder: Path) -> Iterator[Check]:
    about = "weights"
    assert record.digests is not None
    listed = record.digests.files
    present = file_digests(folder)
    for name, digest in listed.items():
        if name not in present:
            yield Check(about, NOT_CHECKED, f"{name} is not here")
        elif present[name] != digest:
            yield Check(about, FAILED, f"{name} is not what was saved: the SHA-256 differs")
        else:
            yield Check(about, OK, f"{name} is what was saved")
    for path in weights_files(folder):
        name, head = path.relative_to(folder).as_posix(), head_in(path)
        if head is not None and head.run_id != record.run_id:
            yield Check(about, FAILED, f"{name} is of another run, {head.run_id}")
        elif head is not None and not record.knows(head):
            yield Check(about, FAILED, f"{name} was saved later than {FILE_NAME} beside it")
    for name in sorted({*present, *other_weights(folder)} - set(listed)):
        yield Check(about, FAILED, f"nothing vouches for {name}: it was not saved by the run")
    if not weights_files(folder) and not any(name.endswith(".safetensors") for name in listed):
        yield Check(about, NOT_CHECKED, "no weights are here, and none are listed")


def other_weights(folder: Path) -> list[str]:
    """List all files below a folder that some program might load as weights, by their names.

    Left out are what hf_dp and Trainer keep in the folder of a run, and checkpoints.
    """
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [each for each in folders if not _OF_A_RUN.fullmatch(each)]
        for name in names:
            path = Path(parent, name).relative_to(folder).as_posix()
            if _WEIGHTS.search(name) and not _STATE.fullmatch(name):
                found.append(path)
    return sorted(found)


def _of_the_card(
    record: PrivacyRecord, statement: PrivacyStatement, folder: Path
) -> Iterator[Check]:
    about, path = "card", folder / CARD
    if not path.is_file():
        yield Check(about, NOT_CHECKED, f"{CARD} is not here")
        return
    try:
        text = path.read_text(encoding="utf-8")
        block = plain(front_matter(text).get(KEY))
    except (OSError, ValueError) as error:
        yield Check(about, FAILED, f"{CARD} cannot be read: {error}")
        return
    head = privacy_head(text)
    if head is None:
        yield Check(about, FAILED, "it has no section Privacy, or several")
        return
    assert record.digests is not None
    if record.digests.privacy_section is None:
        yield Check(
            about, NOT_CHECKED, f"{FILE_NAME} has no digest of a card; `hf-dp card` adds one"
        )
    else:
        differs = digest_of_text(head) != record.digests.privacy_section
        yield _compared("its section Privacy", differs, "the digest")
        differs = digest_of(block) != record.digests.differential_privacy
        yield _compared(f"its {KEY} block", differs, "the digest")
    yield from _as_made_now(record, statement, text, block)


def _as_made_now(
    record: PrivacyRecord, statement: PrivacyStatement, text: str, block: Any
) -> Iterator[Check]:
    """Compare a card with the one that this version would make, where it is of this version."""
    if record.card is None or record.written_by != __version__:
        return
    differs = block != plain(metadata(statement))
    yield _compared(f"its {KEY} block", differs, "the statement")
    head = privacy_head(text) or ""
    details, repository = CardDetails.from_dict(record.card), repository_of(head)
    differs = digest_of_text(head) != digest_of_text(render_head(statement, details, repository))
    yield _compared("its section Privacy", differs, "the statement")
    if not is_as_made(record, text):
        yield Check("card", NOTICE, "it was edited outside what is about privacy")


def _compared(what: str, differs: bool, with_what: str) -> Check:
    if differs:
        return Check("card", FAILED, f"{what} does not agree with {with_what} in {FILE_NAME}")
    return Check("card", OK, f"{what} agrees with {with_what}")


def _of_the_author() -> Iterator[Check]:
    words = "not checked here: anyone who can write these files could have written them together"
    yield Check("author", NOTICE, words)


def summary(report: Report) -> dict[str, Any]:
    """Return a report as plain data, JSON-ready."""
    return {
        "outcome": report.outcome,
        "claim": report.claim,
        "checks": [vars(each) for each in report.checks],
    }
