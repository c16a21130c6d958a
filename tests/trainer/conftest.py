"""What tests of whole runs share."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch

from hf_dp.noise import SecretRandomness
from hf_dp.run.private_run import PrivateRun


@pytest.fixture
def unchecked(monkeypatch):
    """Leave out the self-check of the engine, which is most of a short run, in files that are about
    other things: ``pytestmark = pytest.mark.usefixtures("unchecked")``."""
    monkeypatch.setattr(PrivateRun, "check_engine", lambda self: None)


@pytest.fixture
def without_noise(monkeypatch):
    monkeypatch.setattr(SecretRandomness, "gaussian_like", lambda self, t, std: torch.zeros_like(t))


@pytest.fixture
def warnings_of(monkeypatch) -> Callable[[str], list[str]]:
    """Return the texts that a module of the library will have warned with."""

    def collect(module: str) -> list[str]:
        told: list[str] = []
        monkeypatch.setattr(
            f"hf_dp.{module}.logger.warning",
            lambda text, *values: told.append(text % values if values else text),
        )
        return told

    return collect


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """A private run of 4 steps with checkpoints at 2 and 4: to read, to copy, or to count as an
    earlier one."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    tiny.trainer(folder, save_strategy="steps", save_steps=2).train()
    return folder


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of it, to go on with."""
    return Path(shutil.copytree(finished, tmp_path / "run"))
