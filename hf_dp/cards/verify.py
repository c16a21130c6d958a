"""A card and its evidence: verified against each other, and made together.

What is recomputed here is whatever can be without the training rows: epsilon from the ledger, the
statement from epsilon, the card from the statement, and digests of the weights. Whether the ledger
tells what ran is for whoever published it to say.

``privacy.json`` is written last, so that its digests are of what lies beside it. After a kill in
between, it belongs to no card yet, which ``hf-dp verify`` says; delete README.md, and ``hf-dp
card`` makes one.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hf_dp._dataclasses import plain
from hf_dp._version import __version__
from hf_dp.accounting import SELECTION, TRAINING
from hf_dp.cards.card import privacy_head, render_card, render_head
from hf_dp.cards.details import KEY, CardDetails, front_matter
from hf_dp.errors import HfDpError, LedgerError
from hf_dp.run.ledger_file import LEDGER, read_own
from hf_dp.run.witnesses import head_in, last_with_weights, refuse_foreign, weights_files
from hf_dp.statement.durable import Beside, digest_of_file, digest_of_text, replace_file
from hf_dp.statement.evidence import FILE_NAME, Evidence, disagreements, read
from hf_dp.statement.statement import PrivacyStatement

if TYPE_CHECKING:
    from hf_dp.run.ledger import RunLedger

CARD = "README.md"
# What was chosen to train: as much a result of the private rows as the weights.
SELECTION_FILES = ("selection.json", "selection_masks.safetensors")
# They decide which weights are loaded, and what is computed with them.
CONFIGS = ("config.json", "adapter_config.json", "model.safetensors.index.json")
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
    """One thing that was looked at: OK, FAILED, NOT_CHECKED (what it needs is not there) or NOTICE
    (worth knowing), and what was found."""

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

    def to_dict(self) -> dict[str, object]:
        """Return plain data, JSON-ready."""
        return {"outcome": self.outcome, **asdict(self)}


def verify(folder: str | os.PathLike[str]) -> Report:
    """Check a folder with a model, its card and its ``privacy.json``.

    What is wrong with the files raises nothing: the report lists it.
    """
    folder = Path(folder)
    try:
        evidence = read(folder)
        statement = evidence.restated()
        claim = statement.sentence()
    except (HfDpError, TypeError, ValueError, KeyError, AttributeError) as error:
        return Report((Check(FILE_NAME, FAILED, f"it cannot be read: {error}"),), None)
    checks = [
        Check("plan, ledger, facts", OK, f"they are what was written: {FILE_NAME} has its digest"),
        *_looked("evidence", lambda: checks_of_evidence(evidence, folder)),
        *_looked("schedule", lambda: _of_the_schedule(evidence, statement)),
        *_looked("weights", lambda: _of_other_weights(evidence, folder)),
        *_looked("card", lambda: _of_the_card(evidence, statement, folder)),
        Check(
            "author",
            NOTICE,
            "not checked here: anyone who can write these files could have written them together",
        ),
    ]
    return Report(tuple(checks), claim)


def _looked(about: str, look: Callable[[], Iterable[Check]]) -> list[Check]:
    """Return what was found. What cannot be looked at, whatever is wrong with it, has failed."""
    found = []
    try:
        for check in look():
            found.append(check)
    except Exception as error:  # files of strangers may hold anything
        found.append(Check(about, FAILED, f"it cannot be read: {type(error).__name__}: {error}"))
    return found


def checks_of_evidence(evidence: Evidence, folder: Path) -> Iterator[Check]:
    """Compare a claim with its ledger, and the files of a run with their digests and heads. Only if
    nothing of it failed is a card made."""
    about = "epsilon and statement"
    problems = disagreements(evidence)
    for problem in problems:
        yield Check(about, FAILED, problem)
    if not problems:
        rows = evidence.restated().epsilons
        found = [f"{row.epsilon.value} by {row.accountant}" for row in rows if row.epsilon]
        words = f"recomputed from the ledger: {', '.join(found)}" if found else "none is claimed"
        yield Check(about, OK, words)
    own = read_own(folder)  # where it is here, in the run's own folder
    if own is not None and own.head != evidence.head:
        words = f"the run has not ended, or was killed: {LEDGER} is not the one {FILE_NAME} adds up"
        yield Check("ledger", FAILED, words)
    for path in weights_files(folder):
        name = path.relative_to(folder).as_posix()
        try:
            head = head_in(path)
        except LedgerError as error:
            yield Check("weights", FAILED, str(error))
            continue
        if head is not None and head.run_id != evidence.run_id:
            yield Check("weights", FAILED, f"{name} is of another run, {head.run_id}")
        elif head is not None and not evidence.knows(head):
            yield Check("weights", FAILED, f"{name} was saved later than {FILE_NAME} beside it")
    present = file_digests(folder)
    for name, digest in evidence.files.items():
        if name not in present:
            yield Check("weights", NOT_CHECKED, f"{name} is not here")
        elif present[name] != digest:
            yield Check("weights", FAILED, f"{name} is not what was saved: the SHA-256 differs")
        else:
            yield Check("weights", OK, f"{name} is what was saved")
    yield from _unlisted(evidence, present)


def _unlisted(evidence: Evidence, names: Iterable[str]) -> Iterator[Check]:
    for name in sorted(set(names) - set(evidence.files)):
        yield Check("weights", FAILED, f"nothing vouches for {name}: it was not saved by the run")


def file_digests(folder: Path) -> dict[str, str]:
    """Return the digests of what makes a model what it is: weights, selections and configurations,
    by their names relative to a folder."""
    paths = [*weights_files(folder), *(folder / name for name in (*SELECTION_FILES, *CONFIGS))]
    names = sorted(path.relative_to(folder).as_posix() for path in paths if path.is_file())
    return {name: digest_of_file(folder / name) for name in names}


def _of_other_weights(evidence: Evidence, folder: Path) -> Iterator[Check]:
    """Look for files that some program might load as weights, and that are not the run's."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [each for each in folders if not _OF_A_RUN.fullmatch(each)]
        found += [
            Path(parent, name).relative_to(folder).as_posix()
            for name in names
            if _WEIGHTS.search(name) and not _STATE.fullmatch(name)
        ]
    yield from _unlisted(evidence, set(found) - set(file_digests(folder)))
    if not weights_files(folder) and not any(n.endswith(".safetensors") for n in evidence.files):
        last = last_with_weights(folder)
        other = "" if last is None else f"; weights are in {last}"
        yield Check("weights", NOT_CHECKED, f"no weights are here, and none are listed{other}")


def _of_the_schedule(evidence: Evidence, statement: PrivacyStatement) -> Iterator[Check]:
    plan, about = evidence.plan, "schedule"
    planned = {
        TRAINING: plan.steps_recorded if plan.releases_each_step else 0,
        SELECTION: 0 if plan.selection is None else plan.selection.event().steps,
    }
    ran = {purpose: evidence.ledger.steps(purpose) for purpose in planned}
    words = ", ".join(f"{ran[name]:,} of {planned[name]:,} steps of {name}" for name in planned)
    target = plan.target_epsilon
    if target is not None and statement.epsilon is not None and statement.epsilon > target + 1e-3:
        yield Check(about, FAILED, f"epsilon {statement.epsilon} is above the target {target}")
    elif ran == planned:
        yield Check(about, OK, f"{words}: as planned")
    else:
        yield Check(about, NOTICE, f"{words}: not as planned; the ledger is what counts")


def _of_the_card(evidence: Evidence, statement: PrivacyStatement, folder: Path) -> Iterator[Check]:
    path = folder / CARD
    if not path.is_file():
        yield Check("card", NOT_CHECKED, f"{CARD} is not here")
        return
    text = path.read_text(encoding="utf-8")
    head = privacy_head(text)
    if head is None:
        yield Check("card", FAILED, "it has no section Privacy, or several")
        return
    block, section = f"its {KEY} block", "its section Privacy"
    yield _compared(block, plain(front_matter(text).get(KEY)) == evidence.statement, "the claim")
    if evidence.privacy_section is None:
        words = f"{FILE_NAME} has no digest of a card; `hf-dp card` adds one"
        yield Check("card", NOT_CHECKED, words)
    else:
        yield _compared(section, digest_of_text(head) == evidence.privacy_section, "the digest")
    if evidence.card is not None and evidence.written_by == __version__:  # as would be made today
        again = render_head(statement, CardDetails.from_dict(evidence.card))
        yield _compared(section, digest_of_text(head) == digest_of_text(again), "the statement")
        if not is_as_made(evidence, text):
            yield Check("card", NOTICE, "it was edited outside what is about privacy")


def _compared(what: str, agrees: bool, with_what: str) -> Check:
    if not agrees:
        return Check("card", FAILED, f"{what} does not agree with {with_what} in {FILE_NAME}")
    return Check("card", OK, f"{what} agrees with {with_what}")


def is_as_made(evidence: Evidence, card: str) -> bool:
    """Return whether a card is what this version of hf_dp made: nobody edited it."""
    head = privacy_head(card)
    if head is None or evidence.card is None or digest_of_text(head) != evidence.privacy_section:
        return False
    whole = render_card(evidence.restated(), CardDetails.from_dict(evidence.card), head=head)
    return digest_of_text(whole) == digest_of_text(card)


# -- made together ---


def write_card(
    folder: str | os.PathLike[str],
    statement: PrivacyStatement,
    details: CardDetails,
    book: RunLedger,
) -> None:
    """Write the card into a folder, and then the ``privacy.json`` of its run that vouches for it.

    Raises: as :func:`hf_dp.cards.card.render_card`; LedgerError for a folder of another run;
        OSError."""
    refuse_foreign(Path(folder), book.run_id)
    text = render_card(statement, details)
    with book.held():
        os.makedirs(folder, exist_ok=True)
        replace_file(Path(folder, CARD), [text.encode()])
        book.save(folder, statement, _beside(text, details, file_digests(Path(folder))))


def restate(folder: Path, statement: PrivacyStatement, book: RunLedger) -> None:
    """Let the card and ``privacy.json`` of a checkpoint state what its run does now. What else the
    card says stays. Raises: as :func:`write_card`."""
    card = read(folder).card
    details = CardDetails(model_name=folder.name) if card is None else CardDetails.from_dict(card)
    write_card(folder, statement, details, book)


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
        given: fields of :class:`~hf_dp.cards.details.CardDetails` to set.
        replaced: bytes of configurations that are published instead of those in the folder.

    Raises: LedgerError where the run has not ended, what lies there does not belong together, or
        somebody edited the README.md, which would be lost; InvalidArgumentError."""
    folder = Path(folder)
    evidence, path = read(folder), folder / CARD
    statement = evidence.restated()
    for check in checks_of_evidence(evidence, folder):
        if check.outcome == FAILED:
            raise LedgerError(
                f"The files in {folder} do not belong to {FILE_NAME} there: {check.words}. Resume "
                "the run to its end, take one of its checkpoints, or save the model again: "
                "trainer.save_model(), or hf_dp.save_run(mechanism) in a loop of your own."
            )
    if path.is_file() and not is_as_made(evidence, path.read_text("utf-8", errors="replace")):
        raise LedgerError(
            f"{path} was edited, or another version of hf_dp made it. Say what was added by "
            "trainer.describe(...) or the options of `hf-dp card`, then delete the file: it is "
            "made anew."
        )
    details = CardDetails(model_name=folder.resolve().name)
    if evidence.card is not None:
        details = CardDetails.from_dict(evidence.card)
    details = details.with_given(**dict(given or {}))
    details = replace(details, repository=repository or details.repository)
    text = render_card(statement, details)
    # A card may be kept without its weights, whose digests stay.
    files = {**evidence.files, **file_digests(folder)}
    files |= {
        name: hashlib.sha256(content).hexdigest()
        for name, content in (replaced or {}).items()
        if name in files
    }
    made = evidence.stating(statement, _beside(text, details, files))
    return {CARD: text.encode(), FILE_NAME: made.text().encode()}
