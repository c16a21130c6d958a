"""A finished run, for tests of what goes on from it; planted units that are not clipped as one."""

import shutil
from pathlib import Path

import pytest
import tiny

from hf_dp.batches.loader import Drawn
from hf_dp.batches.units import UnitBatches


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


BATCHES, PARTS = UnitBatches.__call__, UnitBatches._parts


def one_by_one(self, drawn):
    return BATCHES(self, [Drawn([row], one.key) for one in drawn for row in one.unit])


def clipped_in_each_physical_batch(self, unit):
    return (part._replace(continues=False) for part in PARTS(self, unit))


@pytest.fixture(params=[("__call__", one_by_one), ("_parts", clipped_in_each_physical_batch)])
def not_clipped_as_one(request, monkeypatch) -> None:
    """Plant users, or views, whose rows are not clipped together."""
    monkeypatch.setattr(UnitBatches, *request.param)
