"""``privacy.json``: plan, ledger and statement of a run, written durably and never shortened.

The file is the evidence behind an epsilon: it is written with a model and published with it. While
a run goes on, its own ledger (:mod:`hf_dp.run.ledger_file`) counts what it releases.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hf_dp._validate import non_negative
from hf_dp._version import __version__
from hf_dp.accounting import EARLIER, Ledger
from hf_dp.errors import ConfigError, InvalidArgumentError, LedgerError
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.statement.digests import Beside, Digests, Head
from hf_dp.statement.durable import replace_file
from hf_dp.statement.statement import PrivacyStatement, RunFacts
from hf_dp.statement.strict_json import loads
from hf_dp.statement.weaknesses import (
    NAMES,
    EarlierRun,
    Flags,
    Weaknesses,
    each_once,
    plain,
    refuse_unnamed,
)

FILE_NAME = "privacy.json"
RUNNING = "running"
SCHEMA_VERSION = 4
_KEYS = (
    "schema_version", "hf_dp_version", "status", "plan", "ledger", "ledger_head", "statement",
    "card", "digests",
)  # fmt: skip

_NOTHING = Weaknesses()
_ALONE = Beside()
RESTORE = (
    "Save the model again with trainer.save_model(), or restore a backup that is not older. "
    "`hf-dp account ledger OUTPUT_DIR` shows what the run released, from its own ledger."
)


class DamagedRecordError(LedgerError):
    """A ``privacy.json`` is missing, or is not what hf_dp wrote."""


@dataclass(frozen=True)
class PrivacyRecord:
    """What :func:`read` found.

    Attributes:
        plan, ledger: those of the run.
        run_id: which run it is; a run continues only its own ledger.
        weaknesses: what weakens the claim. What did so once does so for good, also after a resume.
        status: that of the statement, or "running".
        statement: a dict that ``PrivacyStatement.from_dict`` reads, or None where nothing is stated
            of all that the run released.
        written_by: the version of hf_dp with which it was written.
        card: what the model card says that does not follow from the statement, as plain data; None
            without a card.
        digests: of the parts of this file and of what lies beside it; None without a statement.
        head: how far the run's own ledger had come; None where it had no line.
    """

    plan: PrivacyPlan
    ledger: Ledger
    run_id: str
    weaknesses: Weaknesses
    status: str = RUNNING
    statement: dict[str, Any] | None = None
    written_by: str = __version__
    card: dict[str, Any] | None = None
    digests: Digests | None = None
    head: Head | None = None

    @property
    def insecure_seed(self) -> bool:
        """Whether the randomness of this run, or of one of its earlier runs, can be reproduced."""
        return any(run.insecure_seed for run in self.weaknesses.everywhere)

    def knows(self, head: Head) -> bool:
        """Return whether what was saved at that point of the run is counted here."""
        return self.head is None or head.lines < self.head.lines or head == self.head

    def lacks(self, other: PrivacyRecord) -> str:
        """Say what ``other`` knows of the same run and this one does not; empty if nothing."""
        if not self.ledger.extends(other.ledger):
            return (
                f"{other.ledger.steps()} releases, which {self.ledger.steps()} here do not continue"
            )
        if not self.weaknesses.includes(other.weaknesses):
            return f"{other.weaknesses} as what weakens the run, against {self.weaknesses} here"
        return ""


def earlier_runs(record: PrivacyRecord) -> tuple[EarlierRun, ...]:
    """List the earlier runs that a run names, and then the run itself."""
    own = {item.name: getattr(record.weaknesses, item.name) for item in fields(Flags)}
    mechanism = record.plan.mechanism
    this = EarlierRun(record.run_id, record.plan.unit, mechanism.relation, **own)
    return each_once((*record.weaknesses.earlier, this))


def to_record(
    plan: PrivacyPlan,
    ledger: Ledger,
    *,
    run_id: str,
    weaknesses: Weaknesses = _NOTHING,
    statement: PrivacyStatement | None = None,
    beside: Beside = _ALONE,
    head: Head | None = None,
) -> dict[str, Any]:
    """Return the content of ``privacy.json``, JSON-ready.

    It holds no realized batch sizes, no seeds and no paths.
    """
    document = {
        "schema_version": SCHEMA_VERSION,
        "hf_dp_version": __version__,
        "status": RUNNING if statement is None else statement.status,
        "plan": {**plan.to_dict(), "run_id": run_id, **weaknesses.to_dict()},
        "ledger": ledger.to_list(),
        "ledger_head": None if head is None else head.to_dict(),
        "statement": None if statement is None else statement.to_dict(),
        "card": None if beside.card is None else plain(beside.card),
    }
    digests = None if statement is None else Digests.of(document, beside).to_dict()
    return {**document, "digests": digests}


def write(path_or_dir: str | os.PathLike[str], record: Mapping[str, Any]) -> Path:
    """Replace the file in one step, durably, and return its path.

    After a kill at any point the file is the old one or the new one, whole.

    Args:
        path_or_dir: a folder (made if absent) or a path that ends in ".json".
        record: made by :func:`to_record`.

    Raises:
        LedgerError: the file there is of another run, holds steps that ``record`` lacks, or
            cannot be read, or ``record`` itself is not well formed. The file is left as it is.
        OSError: the disk refused. The old file is intact.
    """
    path = file_of(path_or_dir)
    new = _record(record, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(path):
        _refuse_to_lose(read(path), new, path)
    text = json.dumps(dict(record), indent=2, allow_nan=False) + "\n"
    replace_file(path, [text.encode()])
    return path


def read(path_or_dir: str | os.PathLike[str]) -> PrivacyRecord:
    """Read a folder's ``privacy.json`` (or the ".json" file named), and guess nothing.

    Raises: LedgerError for a missing, damaged, edited or newer file. The message names the file and
        the next move.
    """
    path = file_of(path_or_dir)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DamagedRecordError(
            f"{path.name} is missing from {path.parent}. Name the folder of a run. If this is it: "
            f"{RESTORE}"
        ) from error
    except UnicodeDecodeError as error:
        raise DamagedRecordError(f"{path} cannot be read ({error}). {RESTORE}") from error
    except OSError as error:
        raise LedgerError(
            f"{path} cannot be read ({error}). Make it readable and try again."
        ) from error
    try:
        data = loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedRecordError(f"{path} is not complete JSON ({error}). {RESTORE}") from error
    return _record(data, path)


def file_of(path_or_dir: str | os.PathLike[str]) -> Path:
    """Return the path of ``privacy.json`` in a folder, or of the ".json" file named."""
    path = Path(path_or_dir)
    return path if path.suffix == ".json" and not path.is_dir() else path / FILE_NAME


def _record(data: Any, path: Path) -> PrivacyRecord:
    """Check a document from top to bottom, and return its record."""
    if not isinstance(data, Mapping) or "schema_version" not in data:
        raise DamagedRecordError(f"{path} is not a privacy record of hf_dp. {RESTORE}")
    version = data["schema_version"]
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise LedgerError(
            f"{path} has schema version {version}; hf_dp {__version__} knows versions up to "
            f"{SCHEMA_VERSION}. Upgrade hf_dp and try again."
        )
    if version != SCHEMA_VERSION or set(data) != set(_KEYS):
        raise DamagedRecordError(
            f"{path} was edited: expected schema version {SCHEMA_VERSION} and the keys "
            f"{list(_KEYS)}, got {version!r} and {list(data)}. {RESTORE}"
        )
    digests = _digests(data, path)
    plan, run_id, weaknesses = _plan(data["plan"], path)
    try:
        ledger = Ledger.from_list(data["ledger"])
        head = None if data["ledger_head"] is None else Head.from_dict(data["ledger_head"])
        if head is not None and head.run_id != run_id:
            raise LedgerError(f"Expected the ledger_head of run {run_id}, got {head}.")
        refuse_unnamed(ledger, weaknesses.earlier)
    except LedgerError as error:
        raise DamagedRecordError(f"{path} was edited or damaged: {error} {RESTORE}") from error
    status, statement = data["status"], data["statement"]
    _check_statement(status, statement, plan, ledger, path)
    card = data["card"]
    if card is not None and not isinstance(card, dict):
        raise DamagedRecordError(f"{path} was edited: its card is {card!r}. {RESTORE}")
    return PrivacyRecord(
        plan,
        ledger,
        run_id,
        weaknesses,
        status,
        statement,
        str(data["hf_dp_version"]),
        card,
        digests,
        head,
    )


def _digests(data: Mapping[str, Any], path: Path) -> Digests | None:
    """Return the digests in a document.

    Raises: LedgerError when a part is not what it was when the document was written.
    """
    if data.get("digests") is None:
        # A run that has ended has them, or its file would say less of itself when they are cut out.
        if data["statement"] is not None and "digests" in data:
            raise DamagedRecordError(f"{path} was edited: its digests are missing. {RESTORE}")
        return None
    try:
        digests = Digests.from_dict(data["digests"])
        changed = digests.changed_parts(data)
    except (LedgerError, TypeError, ValueError) as error:
        raise DamagedRecordError(f"{path} was edited: {error} {RESTORE}") from error
    if changed:
        raise DamagedRecordError(
            f"{path} was edited: its {' and its '.join(changed)} is not what was written (the "
            f"SHA-256 differs). {RESTORE}"
        )
    return digests


def _plan(values: Any, path: Path) -> tuple[PrivacyPlan, str, Weaknesses]:
    values = dict(values) if isinstance(values, Mapping) else {}
    run_id = values.pop("run_id", None)
    of_run = {name: values.pop(name) for name in NAMES if name in values}
    try:
        plan = PrivacyPlan.from_dict(values)
        intact = plan.to_dict() == values
    except (ConfigError, TypeError, ValueError, ArithmeticError) as error:
        raise DamagedRecordError(
            f"{path} was edited: its plan cannot be read ({error}). {RESTORE}"
        ) from error
    if not intact or not isinstance(run_id, str) or not run_id:
        raise DamagedRecordError(
            f"{path} was edited: its plan contradicts itself or has no run_id. {RESTORE}"
        )
    try:
        return plan, run_id, Weaknesses.from_dict(of_run)
    except LedgerError as error:
        raise DamagedRecordError(f"{path} was edited: {error} {RESTORE}") from error


def _check_statement(
    status: Any, statement: Any, plan: PrivacyPlan, ledger: Ledger, path: Path
) -> None:
    """Raise LedgerError when status, statement and ledger do not agree."""
    if statement is None:
        agrees = status == RUNNING
    else:
        try:
            said = PrivacyStatement.from_dict(statement)
        except (LedgerError, AttributeError, KeyError) as error:
            raise DamagedRecordError(
                f"{path}: its statement cannot be read ({error}). {RESTORE}"
            ) from error
        agrees = (
            status == said.status
            and list(said.mechanisms) == ledger.to_list()
            and said.delta == plan.delta
        )
    if not agrees:
        raise DamagedRecordError(
            f"{path} was edited: its status or statement does not belong to its ledger. {RESTORE}"
        )


def _refuse_to_lose(old: PrivacyRecord, new: PrivacyRecord, path: Path) -> None:
    if new.run_id != old.run_id:
        raise LedgerError(
            f"{path} belongs to run {old.run_id}, not to {new.run_id}, and is the evidence of that "
            "run's privacy. Use another output folder, or resume that run."
        )
    if not new.ledger.extends(old.ledger):
        raise LedgerError(
            f"{path} records {old.ledger.steps()} steps that the new ledger ({new.ledger.steps()} "
            "steps) does not continue; overwriting it would under-report. Resume from the ledger "
            f"in {path.name}."
        )
    if not new.weaknesses.includes(old.weaknesses):
        raise LedgerError(
            f"{path} records {old.weaknesses} as what weakens the claim, but the new record has "
            f"{new.weaknesses}. What was true of a run once is true for good. Resume from the "
            f"record in {path.name}."
        )


def disagreements(record: PrivacyRecord) -> list[str]:
    """List, in words, what in the statement does not follow from the rest of the file.

    An epsilon may be larger than what is computed now (another version's bound may be looser), but
    never smaller. The file is not signed: if all of it is rewritten so that it agrees, nothing is
    found.

    Raises: LedgerError when the statement cannot be read.
    """
    if record.statement is None:
        return []
    facts = RunFacts.from_dict(record.statement["facts"])
    problems = [
        f"{name} is {getattr(facts, name)!r} in the statement and "
        f"{getattr(record.weaknesses, name)!r} in the plan"
        for name in NAMES
        if getattr(facts, name) != getattr(record.weaknesses, name)
    ]
    if problems:
        return problems  # the facts cannot be used
    problems += [
        f"the ledger has steps of {entry.purpose} that are not the plan's: {entry.event.to_dict()}"
        for entry in record.ledger.entries
        # What was named as earlier: nothing here can tell whether all of it was.
        if entry.purpose != EARLIER and not record.plan.makes(entry)
    ]
    now = PrivacyStatement.from_ledger(record.plan, record.ledger, facts).to_dict()
    rows = [(name, record.statement[name], now[name]) for name in now if name != "epsilons"]
    stated, found = record.statement["epsilons"], now["epsilons"]
    said_by, found_by = ([row["accountant"] for row in each] for each in (stated, found))
    rows.append(("accountants", said_by, found_by))
    rows += [
        (f"{what} by {again['accountant']}", row[what], again[what])
        for row, again in zip(stated, found, strict=False)
        for what in again
    ]
    return problems + [
        f"{name} is stated as {said!r}, and the ledger gives {computed!r}"
        for name, said, computed in rows
        if said != computed and not (_is_epsilon(name) and _looser(said, computed))
    ]


def _is_epsilon(name: str) -> bool:
    return name == "epsilon" or name.startswith(("epsilon by", "estimate by"))


def _looser(stated: Any, found: Any) -> bool:
    try:
        return found is not None and non_negative("epsilon", stated) >= found
    except InvalidArgumentError:
        return False
