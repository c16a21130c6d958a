"""What tests of whole runs share."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny
import torch

from hf_dp.accounting.accountants import Answer
from hf_dp.noise import SecretRandomness
from hf_dp.run.private_run import PrivateRun
from hf_dp.statement import wording


@pytest.fixture(scope="module", autouse=True)
def without_prv() -> Iterator[None]:
    """Leave PRV's epsilon out of statements, which tests/cards is about: it takes a quarter of a
    second for each new event, as long as a short run."""
    compare = wording.compare

    def by_others(events, delta, names):
        found = iter(compare(events, delta, [name for name in names if name != "prv"]))
        left_out = Answer("prv", None, "left out")
        return tuple(left_out if name == "prv" else next(found) for name in names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wording, "compare", by_others)
        yield


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
    """A private run of 4 steps with checkpoints at 2 and 4."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    tiny.trainer(folder, save_strategy="steps", save_steps=2).train()
    return folder


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of it, to go on with."""
    return Path(shutil.copytree(finished, tmp_path / "run"))
