"""What tests of whole runs share."""

from __future__ import annotations

import pytest

from hf_dp.run.private_run import PrivateRun


@pytest.fixture
def unchecked(monkeypatch):
    """Leave out the self-check of the engine, which is most of a short run, in files that are about
    other things: ``pytestmark = pytest.mark.usefixtures("unchecked")``."""
    monkeypatch.setattr(PrivateRun, "check_engine", lambda self: None)
