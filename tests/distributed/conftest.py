"""Runs of several processes without their self-check."""

import pytest


@pytest.fixture
def unchecked(monkeypatch):
    """Leave out what the self-check of the engine compares. Its synthetic examples stay: a process
    that has none of its own takes those."""
    for name in ("_compare", "_check_length"):
        monkeypatch.setattr(f"hf_dp.run.engine_check.EngineCheck.{name}", lambda *given: None)
