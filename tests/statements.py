"""Plans, facts and statements for the tests of statements and cards, and records edited by hand."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_dp.accounting import Ledger
from hf_dp.accounting.accountants import Answer
from hf_dp.errors import LedgerError
from hf_dp.plans import DpSgdPlan, PrivacyPlan
from hf_dp.statement import wording
from hf_dp.statement.durable import digest_of
from hf_dp.statement.evidence import FILE_NAME, disagreements, read
from hf_dp.statement.facts import RunFacts
from hf_dp.statement.statement import PrivacyStatement

Comparison = Callable[[Any, float, Sequence[str]], tuple[Answer, ...]]


def comparison_by(*accountants: str) -> Comparison:
    """Compare by these accountants alone: others take longer than a short run, or much memory."""
    compare = wording.compare

    def by_these(events: Any, delta: float, names: Sequence[str]) -> tuple[Answer, ...]:
        found = iter(compare(events, delta, [name for name in names if name in accountants]))
        left_out = (Answer(name, None, "left out") for name in names if name not in accountants)
        return tuple(next(found if name in accountants else left_out) for name in names)

    return by_these


N = 67349
SST2 = PrivacyPlan(N, 1024.0, 198, 1 / (2 * N), DpSgdPlan(0.1, 0.825421))
SMALL = PrivacyPlan(1000, 100.0, 10, 1e-4, DpSgdPlan(1.0, 2.0))
FACTS = RunFacts(
    trained="all 22,713,986 parameters",
    precision="float32",
    noise_generator="SFC64, OS-seeded (not cryptographic)",
    sampling_generator="the operating system's cryptographic generator",
    versions={"torch": "2.9.0"},
)


def ledger_of(plan: PrivacyPlan = SMALL, steps: int | None = None) -> Ledger:
    ledger = Ledger()
    ledger.append(plan.event(steps), "training")
    return ledger


def statement_of(
    plan: PrivacyPlan = SMALL, ledger: Ledger | None = None, **facts: Any
) -> PrivacyStatement:
    ran = ledger_of(plan) if ledger is None else ledger
    return PrivacyStatement.from_ledger(plan, ran, dataclasses.replace(FACTS, **facts))


def rewrite(path: Path, change: Callable[[Any], Any], *, renew: bool = True) -> None:
    """Edit a document by hand. Args: renew: whether its digest then agrees with it again."""
    data = json.loads(path.read_text())
    change(data)
    if renew and isinstance(data, dict):
        data.pop("digest", None)
        data["digest"] = digest_of(data)
    path.write_text(json.dumps(data))


def problems(path: Path) -> str:
    """What a reader finds wrong with a ``privacy.json``: why it is refused, or what disagrees."""
    try:
        return "; ".join(disagreements(read(path)))
    except LedgerError as error:
        said = str(error)
    assert FILE_NAME in said
    return said
