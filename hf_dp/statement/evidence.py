"""``privacy.json``: the evidence behind an epsilon, written durably with a model and published with
it: plan, ledger and facts, from which the statement is computed, and what the run claims.

While a run goes on, its own ledger (:mod:`hf_dp.run.ledger_file`) counts what it releases."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from hf_dp._dataclasses import plain
from hf_dp._version import __version__
from hf_dp.accounting import EARLIER, Ledger
from hf_dp.errors import HfDpError, LedgerError
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.plans.units import NONE
from hf_dp.statement.durable import Beside, Head, digest_of, is_digest, loads, replace_file
from hf_dp.statement.facts import (
    NAMES,
    EarlierRun,
    Flags,
    RunFacts,
    Weaknesses,
    each_once,
    refuse_unnamed,
)
from hf_dp.statement.statement import PrivacyStatement, observed, why_not_private
from hf_dp.statement.wording import NOT_PRIVATE, RUNNING, STATUSES

FILE_NAME = "privacy.json"
SCHEMA_VERSION = 5
_KEYS = (
    "schema_version", "hf_dp_version", "plan", "ledger", "ledger_head", "facts", "statement",
    "card", "privacy_section", "files", "digest",
)  # fmt: skip
RESTORE = (
    "Save the model again with trainer.save_model(), or restore a backup that is not older. "
    "`hf-dp account ledger OUTPUT_DIR` shows what the run released, from its own ledger."
)


@dataclass(frozen=True)
class Evidence(Beside):
    """What a ``privacy.json`` holds, with what lies beside it.

    Attributes:
        weaknesses: what weakens the claim. What did so once does so for good, also after a resume.
        facts, statement: these, and how the run was made, and what it claims
            (:meth:`PrivacyStatement.to_dict`); None where nothing is stated yet.
        written_by: the version of hf_dp with which it was written.
        head: how far the run's own ledger had come; None where it had no line.

    Raises: LedgerError for a head of another run, or earlier runs that count and are not named.
    """

    plan: PrivacyPlan
    ledger: Ledger
    run_id: str
    weaknesses: Weaknesses = Weaknesses()
    facts: RunFacts | None = None
    statement: Mapping[str, Any] | None = None
    written_by: str = __version__
    head: Head | None = None

    def __post_init__(self) -> None:
        refuse_unnamed(self.ledger, self.weaknesses.earlier)
        if self.head is not None and self.head.run_id != self.run_id:
            raise LedgerError(f"expected the ledger_head of run {self.run_id}, got {self.head}.")

    @property
    def status(self) -> str:
        """That of the statement, or "running"."""
        return RUNNING if self.statement is None else self.statement["status"]

    @property
    def refuted(self) -> bool:
        """Whether an audit of this run refuted what its ledger gives."""
        if self.weaknesses.refuted:
            return True
        # As it was written before such a run was weakened.
        audited = self.facts is not None and self.facts.audit is not None
        return audited and self.status == NOT_PRIVATE

    @property
    def no_epsilon(self) -> str:
        """Why no epsilon holds, whatever the ledger gives, of a run that goes on, too; empty if one
        may."""
        if reason := why_not_private(self.ledger, self.weaknesses):
            return reason
        if self.refuted:
            return "an audit refuted what the ledger gives"
        if seen := observed(self.weaknesses):
            return "; ".join(seen)
        unknown = any(NONE in (run.unit, run.relation) for run in earlier_runs(self))
        unknown |= not all(event.established for event in self.ledger.events)
        return "no bound is known for what ran" if unknown else ""

    def stating(self, statement: PrivacyStatement, beside: Beside) -> Evidence:
        """Return it with what the run claims, and with what then lies beside it."""
        said = plain(statement.to_dict())
        return replace(self, facts=statement.facts, statement=said, **vars(beside))

    def text(self) -> str:
        """Return the text of ``privacy.json``: no realized batch sizes, no seeds, no paths."""
        document = {
            "schema_version": SCHEMA_VERSION,
            "hf_dp_version": __version__,
            "plan": {**self.plan.to_dict(), "run_id": self.run_id, **self.weaknesses.to_dict()},
            "ledger": self.ledger.to_list(),
            "ledger_head": None if self.head is None else self.head.to_dict(),
            "facts": None if self.facts is None else self.facts.made(),
            "statement": self.statement,
            "card": plain(self.card),
            "privacy_section": self.privacy_section,
            "files": dict(self.files),
        }
        document["digest"] = digest_of(document)
        return json.dumps(document, indent=2, allow_nan=False) + "\n"

    def restated(self) -> PrivacyStatement:
        """Compute the statement from plan, ledger and facts. Raises: LedgerError without facts."""
        if self.facts is None:
            raise LedgerError(
                f"{FILE_NAME} has no statement: the run has not ended, or was killed. Resume it to "
                "its end, or take one of its checkpoints."
            )
        return PrivacyStatement.from_ledger(self.plan, self.ledger, self.facts)

    def knows(self, head: Head) -> bool:
        """Return whether what was saved at that point of the run is counted here."""
        return self.head is None or head.lines < self.head.lines or head == self.head

    def lacks(self, other: Evidence) -> str:
        """Say what ``other`` knows of the same run and this one does not; empty if nothing."""
        if not self.ledger.extends(other.ledger):
            return (
                f"{other.ledger.steps()} releases, which {self.ledger.steps()} here do not continue"
            )
        if not self.weaknesses.includes(other.weaknesses):
            return f"{other.weaknesses} as what weakens the run, against {self.weaknesses} here"
        return ""


def earlier_runs(evidence: Evidence) -> tuple[EarlierRun, ...]:
    """List the earlier runs that a run names, and then the run itself."""
    own = {item.name: getattr(evidence.weaknesses, item.name) for item in fields(Flags)}
    plan = evidence.plan
    own |= {"refuted": evidence.refuted, "conditions": plan.words.conditions}
    unit = plan.unit if plan.mechanism.established else NONE
    this = EarlierRun(evidence.run_id, unit, plan.mechanism.relation, head=evidence.head, **own)
    return each_once((*evidence.weaknesses.earlier, this))


def write(path_or_dir: str | os.PathLike[str], evidence: Evidence) -> Path:
    """Replace the file in one step, durably, and return its path.

    After a kill at any point the file is the old one or the new one, whole.

    Args:
        path_or_dir: a folder (made if absent) or a path that ends in ".json".
        evidence: of the run.

    Raises:
        LedgerError: the file there is of another run, holds steps that ``evidence`` lacks, or
            cannot be read. The file is left as it is.
        OSError: the disk refused. The old file is intact.
    """
    path = file_of(path_or_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(path):
        old = read(path)
        if evidence.run_id != old.run_id:
            raise LedgerError(
                f"{path} belongs to run {old.run_id}, not to {evidence.run_id}, and is the "
                "evidence of that run's privacy. Use another output folder, or resume that run."
            )
        if lost := evidence.lacks(old):
            raise LedgerError(
                f"{path} knows {lost}; overwriting it would under-report. What was released, or "
                f"true, once is so for good. Resume from {path.name}."
            )
    replace_file(path, [evidence.text().encode()])
    return path


def read(path_or_dir: str | os.PathLike[str]) -> Evidence:
    """Read a folder's ``privacy.json`` (or the ".json" file named), and guess nothing.

    Raises: LedgerError for a missing, damaged, edited or newer file."""
    path = file_of(path_or_dir)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        if not path.parent.exists():
            raise LedgerError(
                f"The folder {path.parent} does not exist. Name that of a run."
            ) from error
        raise LedgerError(
            f"{path.name} is missing from {path.parent}. Name the folder of a run. If this is it: "
            f"{RESTORE}"
        ) from error
    except (UnicodeDecodeError, OSError) as error:
        raise LedgerError(
            f"{path} cannot be read ({error}). Make it readable, or: {RESTORE}"
        ) from error
    try:
        data = loads(text)
    except (ValueError, RecursionError) as error:
        raise LedgerError(f"{path} is not complete JSON ({error}). {RESTORE}") from error
    if not isinstance(data, Mapping) or "schema_version" not in data:
        raise LedgerError(f"{path} is not a {FILE_NAME} of hf_dp. {RESTORE}")
    version = data["schema_version"]
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise LedgerError(
            f"{path} has schema version {version}; hf_dp {__version__} knows versions up to "
            f"{SCHEMA_VERSION}. Upgrade hf_dp and try again."
        )
    try:
        return _parts(data)
    except (HfDpError, TypeError, ValueError, ArithmeticError) as error:
        raise LedgerError(f"{path} was edited or damaged: {error} {RESTORE}") from error


def file_of(path_or_dir: str | os.PathLike[str]) -> Path:
    """Return the path of ``privacy.json`` in a folder, or of the ".json" file named."""
    path = Path(path_or_dir)
    return path if path.suffix == ".json" and not path.is_dir() else path / FILE_NAME


def _parts(data: Mapping[str, Any]) -> Evidence:
    """Read each part of a document. Raises: various errors for what hf_dp did not write."""
    if data["schema_version"] != SCHEMA_VERSION or set(data) != set(_KEYS):
        raise LedgerError(
            f"expected schema version {SCHEMA_VERSION} and the keys {list(_KEYS)}, got "
            f"{data['schema_version']!r} and {list(data)}."
        )
    if digest_of({key: data[key] for key in _KEYS[:-1]}) != data["digest"]:
        raise LedgerError("it is not what was written (the SHA-256 differs).")
    values = dict(data["plan"])
    run_id = values.pop("run_id", None)
    weaknesses = Weaknesses.from_dict({name: values.pop(name) for name in NAMES if name in values})
    plan = PrivacyPlan.from_dict(values)
    if plan.to_dict() != values or not isinstance(run_id, str) or not run_id:
        raise LedgerError("its plan contradicts itself or has no run_id.")
    ledger = Ledger.from_list(data["ledger"])
    head = None if data["ledger_head"] is None else Head.from_dict(data["ledger_head"])
    facts = None if data["facts"] is None else RunFacts.of(weaknesses, data["facts"])
    statement, section, files = data["statement"], data["privacy_section"], data["files"]
    for name in ("statement", "card"):
        if data[name] is not None and not isinstance(data[name], dict):
            raise LedgerError(f"expected its {name} to be a mapping, got {data[name]!r}.")
    status = RUNNING if statement is None else statement.get("status")
    if (facts is None) != (statement is None) or status not in STATUSES:
        raise LedgerError(f"expected facts, and a statement with a status, got {status!r}.")
    if not isinstance(files, dict) or not all(
        is_digest(each) for each in (*files.values(), *[section] * (section is not None))
    ):
        raise LedgerError("expected digests of the card's section and of files by name.")
    return Evidence(
        plan, ledger, run_id, weaknesses, facts, statement, str(data["hf_dp_version"]), head,
        card=data["card"], privacy_section=section, files=files,
    )  # fmt: skip


def disagreements(evidence: Evidence) -> list[str]:
    """List, in words, what in the claim does not follow from the rest of the file.

    An epsilon may be larger than what is computed now (another version's bound may be looser), but
    never smaller.

    Raises: HfDpError when no statement can be computed.
    """
    if evidence.statement is None:
        return []
    said, now = evidence.statement, plain(evidence.restated().to_dict())
    return [
        f"the ledger has steps of {entry.purpose} that are not the plan's: {entry.event.to_dict()}"
        for entry in evidence.ledger.entries
        # What was named as earlier: nothing here can tell whether all of it was.
        if entry.purpose != EARLIER and not evidence.plan.makes(entry)
    ] + [
        f"{name} is stated as {said.get(name)!r}, and the ledger gives {now.get(name)!r}"
        for name in {**now, **said}
        if said.get(name) != now.get(name)
        and not (name == "epsilon" and _is_looser(said.get(name), now[name]))
    ]


def _is_looser(stated: object, found: float | None) -> bool:
    return isinstance(stated, float) and found is not None and stated >= found
