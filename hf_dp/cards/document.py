"""``privacy.json``: plan, ledger and statement of a run, written durably and never shortened.

The file is the evidence behind an epsilon. It is rewritten before each noised gradient becomes visible, so a kill at
any point leaves a file that counts at least all that was released.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hf_dp._version import __version__
from hf_dp.accounting import Ledger
from hf_dp.cards.statement import PrivacyStatement
from hf_dp.errors import ConfigError, LedgerError
from hf_dp.plan import PrivacyPlan

SCHEMA_VERSION = 1
FILE_NAME = "privacy.json"
RUNNING = "running"

_KEYS = ("schema_version", "hf_dp_version", "status", "plan", "ledger", "statement")
_RUN_FACTS = ("run_id", "insecure_seed", "released", "model_selection")  # beside the plan's own fields
_RESTORE = "Restore it from a backup or a checkpoint of the same run; without it the privacy of this run is not known."


@dataclass(frozen=True)
class PrivacyRecord:
    """What :func:`read` found.

    Attributes:
        plan, ledger: of the run.
        run_id: which run; a ledger continues only its own.
        insecure_seed, released, model_selection: what weakened the claim once weakens it for good, also after a resume.
        status: the statement's, or "running".
        statement: as a dict (``PrivacyStatement.from_dict`` reads it), or None while the run has not ended.
    """

    plan: PrivacyPlan
    ledger: Ledger
    run_id: str
    insecure_seed: bool
    released: tuple[str, ...]
    model_selection: bool
    status: str
    statement: dict[str, Any] | None


def document(
    plan: PrivacyPlan,
    ledger: Ledger,
    *,
    run_id: str,
    insecure_seed: bool = False,
    released: Iterable[str] = (),
    model_selection: bool = False,
    statement: PrivacyStatement | None = None,
) -> dict[str, Any]:
    """The content of ``privacy.json``: JSON-ready, no realised batch sizes, no seeds, no paths."""
    return {
        "schema_version": SCHEMA_VERSION,
        "hf_dp_version": __version__,
        "status": RUNNING if statement is None else statement.status,
        "plan": {
            **plan.to_dict(),
            "run_id": run_id,
            "insecure_seed": insecure_seed,
            "released": list(released),
            "model_selection": model_selection,
        },
        "ledger": ledger.to_list(),
        "statement": None if statement is None else statement.to_dict(),
    }


def write(path_or_dir: str | os.PathLike[str], document: Mapping[str, Any]) -> Path:
    """Replaces the file in one step, durably: after return, or a kill, it is the old one or the new one, whole.

    Args:
        path_or_dir: a folder (made if absent) or a path that ends in ".json".
        document: of :func:`document`.

    Raises:
        LedgerError: the file there is of another run, holds steps that ``document`` lacks, or cannot be read; it is
            left as it is. Or ``document`` itself is not well formed.
        OSError: the disk refused; the old file is intact.
    """
    path = _file(path_or_dir)
    new = _record(document, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(path):
        _refuse_to_lose(read(path), new, path)
    text = json.dumps(dict(document), indent=2, allow_nan=False) + "\n"
    temporary = path.with_name(f"_{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)
    return path


def read(path_or_dir: str | os.PathLike[str]) -> PrivacyRecord:
    """What a folder's ``privacy.json`` (or the ".json" file named) says; nothing is guessed.

    Raises: LedgerError for a missing, damaged, edited or newer file; the message names it and the next move.
    """
    path = _file(path_or_dir)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise LedgerError(f"{path.name} is missing from {path.parent}. {_RESTORE}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise LedgerError(f"{path} cannot be read ({error}). {_RESTORE}") from error
    try:
        data = json.loads(text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise LedgerError(f"{path} is not complete JSON ({error}). {_RESTORE}") from error
    return _record(data, path)


def _file(path_or_dir: str | os.PathLike[str]) -> Path:
    path = Path(path_or_dir)
    return path if path.suffix == ".json" and not path.is_dir() else path / FILE_NAME


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that hf_dp writes")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_constant(text)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a key appears twice among {[key for key, _ in pairs]}")
    return found


def _record(data: Any, path: Path) -> PrivacyRecord:
    """Checks a document from top to bottom."""
    if not isinstance(data, Mapping) or "schema_version" not in data:
        raise LedgerError(f"{path} is not a privacy record of hf_dp. {_RESTORE}")
    version = data["schema_version"]
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise LedgerError(
            f"{path} has schema version {version}; hf_dp {__version__} knows up to {SCHEMA_VERSION}. "
            "Upgrade hf_dp and try again."
        )
    if version != SCHEMA_VERSION or set(data) != set(_KEYS):
        raise LedgerError(f"{path} was edited: expected the keys {list(_KEYS)}, got {list(data)}. {_RESTORE}")
    plan, run = _plan(data["plan"], path)
    try:
        ledger = Ledger.from_list(data["ledger"])
    except LedgerError as error:
        raise LedgerError(f"{path} was edited or damaged: {error}") from error
    status, statement = data["status"], data["statement"]
    _check_statement(status, statement, plan, ledger, path)
    run["released"] = tuple(run["released"])
    return PrivacyRecord(plan, ledger, **run, status=status, statement=statement)


def _plan(values: Any, path: Path) -> tuple[PrivacyPlan, dict[str, Any]]:
    values = dict(values) if isinstance(values, Mapping) else {}
    run = {name: values.pop(name, None) for name in _RUN_FACTS}
    try:
        plan = PrivacyPlan.from_dict(values)
        intact = plan.to_dict() == values
    except (ConfigError, TypeError, ValueError, ArithmeticError) as error:
        raise LedgerError(f"{path} was edited: its plan cannot be read ({error}). {_RESTORE}") from error
    released = isinstance(run["released"], list) and all(isinstance(name, str) for name in run["released"])
    named = isinstance(run["run_id"], str) and bool(run["run_id"]) and released
    flags = isinstance(run["insecure_seed"], bool) and isinstance(run["model_selection"], bool)
    if not (intact and named and flags):
        raise LedgerError(f"{path} was edited: its plan contradicts itself or has no run_id. {_RESTORE}")
    return plan, run


def _check_statement(status: Any, statement: Any, plan: PrivacyPlan, ledger: Ledger, path: Path) -> None:
    """Status, statement and ledger must tell the same story."""
    if statement is None:
        agrees = status == RUNNING
    else:
        try:
            said = PrivacyStatement.from_dict(statement)
        except (LedgerError, AttributeError, KeyError) as error:
            raise LedgerError(f"{path}: its statement cannot be read ({error}). {_RESTORE}") from error
        agrees = status == said.status and list(said.mechanisms) == ledger.to_list() and said.delta == plan.delta
    if not agrees:
        raise LedgerError(f"{path} was edited: its status or statement does not belong to its ledger. {_RESTORE}")


def _refuse_to_lose(old: PrivacyRecord, new: PrivacyRecord, path: Path) -> None:
    if new.run_id != old.run_id:
        raise LedgerError(
            f"{path} belongs to run {old.run_id}, not to {new.run_id}, and is the evidence of its privacy. "
            "Use another output folder, or resume that run."
        )
    if not new.ledger.extends(old.ledger):
        raise LedgerError(
            f"{path} records {old.ledger.steps()} steps that the new ledger ({new.ledger.steps()} steps) does not "
            f"continue; overwriting it would under-report. Resume from the ledger in {path.name}."
        )


def _sync_folder(folder: Path) -> None:
    """Makes a rename durable, where the system can (POSIX)."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
