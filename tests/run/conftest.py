"""The ledger of a file's plan, open."""

from collections.abc import Iterator

import pytest

from hf_dp.run.ledger import RunLedger


@pytest.fixture
def book(request, tmp_path) -> Iterator[RunLedger]:
    ledger = RunLedger(tmp_path / "run", request.module.PLAN)
    ledger.start(ledger.plan.steps)
    yield ledger
    ledger.stop()
