"""Check that a ``privacy.json`` states only what follows from its own plan and ledger.

The file is not signed: if plan, ledger and statement are rewritten together so that they agree, the
check passes. It finds every statement that says more than its own evidence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_dp._validate import non_negative
from hf_dp._version import __version__
from hf_dp.accounting import EARLIER
from hf_dp.errors import InvalidArgumentError
from hf_dp.statement.record import PrivacyRecord
from hf_dp.statement.statement import PrivacyStatement, RunFacts
from hf_dp.statement.weaknesses import NAMES

# Fields of wording, which another version of hf_dp may word differently. Numbers and kinds are
# compared whatever the version.
_WORDING = (
    "status_reason",
    "accountant_note",
    "sampling",
    "mechanism",
    "covered",
    "not_covered",
)
_BOUNDS = ("epsilon", "epsilons", "accountant")


def disagreements(record: PrivacyRecord, *, wording: bool = True) -> list[str]:
    """List, in words, what in the statement does not follow from the rest of the file.

    Args: wording: whether what this version of hf_dp would word differently counts, too.

    An epsilon may be larger than what is computed now (another version's bound may be looser), but
    never smaller.

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
    same_version = record.written_by == __version__
    for name, value in now.items():
        if name not in (*_BOUNDS, "facts") and ((wording and same_version) or name not in _WORDING):
            if record.statement[name] != value:
                stated, found = _differing(record.statement[name], value)
                problems.append(f"{name} is stated as {stated!r}, and the ledger gives {found!r}")
    return problems + _bounds(record.statement, now)


def _differing(stated: Any, found: Any) -> tuple[Any, Any]:
    """Return two values, of two lists only the items in which they differ."""
    if not (isinstance(stated, list) and isinstance(found, list)):
        return stated, found
    only_stated = [item for item in stated if item not in found]
    only_found = [item for item in found if item not in stated]
    return (only_stated, only_found) if only_stated or only_found else (stated, found)


def _bounds(said: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    rows = [
        ("epsilon", said["epsilon"], now["epsilon"]),
        ("accountant", said["accountant"], now["accountant"]),
        ("accountants", *([row["accountant"] for row in each["epsilons"]] for each in (said, now))),
    ]
    for row, again in zip(said["epsilons"], now["epsilons"], strict=False):
        name = again["accountant"]
        if (again["epsilon"], row["kind"]) == (None, "estimate") and _looser(
            row["epsilon"], now["epsilon"]
        ):
            continue  # earlier versions also stated an estimate above the bound
        rows += [
            (f"{what} by {name}", row[what], again[what])
            for what in ("kind", "epsilon", "estimate")
        ]
    return [
        f"{name} is stated as {stated!r}, and the ledger gives {found!r}"
        for name, stated, found in rows
        if stated != found and not _looser(stated, found)
    ]


def _looser(stated: Any, found: Any) -> bool:
    try:
        return found is not None and non_negative("epsilon", stated) >= found
    except InvalidArgumentError:
        return False
