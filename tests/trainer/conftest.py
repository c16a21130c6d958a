"""A finished run, for tests of what goes on from it."""

import shutil
from pathlib import Path

import pytest
import tiny


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """A private run of 4 steps with checkpoints at 2 and 4."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    tiny.trainer(folder, save_strategy="steps", save_steps=2).train()
    return folder


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of it, to go on with."""
    return Path(shutil.copytree(finished, tmp_path / "run"))
