"""Versions of ``privacy.json``: what older ones did not say, and when they can be read
nevertheless.

- 1: up to hf_dp 0.1.0. Of earlier runs it holds the releases, and not what weakened them.
- 2: ``earlier``, ``rows_are_chunks`` and ``evaluation_compared`` of the run; ``unit_code`` of the
    statement.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_dp.accounting import EARLIER
from hf_dp.cards.units import unit_of
from hf_dp.errors import ConfigError, LedgerError
from hf_dp.plan import PrivacyPlan

SCHEMA_VERSION = 2

# What a file of version 1 leaves open. Its evaluation sets were not compared with the training
# rows.
_SINCE_2: dict[str, Any] = {"rows_are_chunks": False, "evaluation_compared": False, "earlier": []}


def upgraded(data: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Return a document as the current version would have written it.

    Raises: LedgerError for a file of version 1 with earlier runs: what weakened these is not in it.
    """
    if data["schema_version"] == SCHEMA_VERSION:
        return data
    rows = data["ledger"] if isinstance(data["ledger"], list) else []
    if any(isinstance(row, Mapping) and row.get("purpose") == EARLIER for row in rows):
        raise LedgerError(
            f"{path} has schema version 1, and counts earlier runs without what weakened them: "
            "un-noised quantities that they released, labels that they left public. Expected "
            f"schema version {SCHEMA_VERSION}, which says it. Its claim can be read with hf_dp "
            f"{data['hf_dp_version']}, which wrote it, and holds no further than that of each run "
            "that it counts; this version can neither resume the run nor take it for an earlier "
            "one."
        )
    if not isinstance(data["plan"], Mapping):
        return data  # which is found out where plans are read
    if added := sorted(set(_SINCE_2) & set(data["plan"])):
        raise LedgerError(
            f"{path} was edited: schema version 1 has no {added}. Restore the version that it was "
            "written with."
        )
    plan = {**data["plan"], **_SINCE_2}
    statement = data["statement"]
    if isinstance(statement, Mapping) and isinstance(statement.get("facts"), Mapping):
        try:
            code = unit_of(PrivacyPlan.from_dict(plan))
        except (ConfigError, TypeError, ValueError, ArithmeticError):
            return {**data, "plan": plan}
        statement = {**statement, "facts": {**statement["facts"], **_SINCE_2}, "unit_code": code}
    return {**data, "plan": plan, "statement": statement}
