"""A Hub on loopback, and finished runs of the tiny task."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import tiny
from huggingface_hub import HfApi, constants
from loopback_hub import TOKEN, LoopbackHub
from peft import LoraConfig

from hf_dp.tuners.frost.tuner import FrostConfig

SAVES = {"save_strategy": "steps", "save_steps": 2, "logging_strategy": "no"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """The loopback Hub, where the client of this process finds it, with a token that may write."""
    loopback = LoopbackHub()
    monkeypatch.setattr("hf_dp.publishing.hub.HfApi", partial(HfApi, endpoint=loopback.url))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield loopback
    loopback.close()


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model in a folder, with its tokenizer."""
    return tiny.save(tmp_path_factory.mktemp("bases") / "local-base")


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Callable[[str], Path]:
    """Folders of finished runs by their method: 4 steps, checkpoints at 2 and 4."""
    made: dict[str, Path] = {}
    configs = {
        "full": None,
        "lora": LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"),
        "frost": FrostConfig(
            unfreeze_ratio=0.3,
            selection_sample_rate=0.3,
            selection_iterations=3,
            selection_noise_multiplier=2.0,
        ),
    }

    def folder_of(method: str) -> Path:
        if method not in made:
            folder = tmp_path_factory.mktemp("runs") / method
            given = {"model": str(base), "peft_config": configs[method]}
            tiny.trained(tiny.trainer(folder, given=given, **SAVES)).save_model()
            made[method] = folder
        return made[method]

    return folder_of


@pytest.fixture
def full(trained: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a finished run of the whole model."""
    return Path(shutil.copytree(trained("full"), tmp_path / "full"))


@pytest.fixture
def lora(trained: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a finished run of an adapter, whose base is a local folder."""
    return Path(shutil.copytree(trained("lora"), tmp_path / "lora"))
