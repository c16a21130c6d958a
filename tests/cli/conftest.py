"""A recipe of the tiny task, for tests of the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml

from hf_dp.cli.main import main


@pytest.fixture
def task(tmp_path) -> Path:
    """A configuration file of the tiny task, with a model folder and data files beside it."""
    tiny.model().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    for name, part in (("train", tiny.rows(40)), ("dev", tiny.held_out_rows())):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    values = {
        "task": "text_classification", "model_name_or_path": str(tmp_path / "model"),
        "train_file": str(tmp_path / "train.jsonl"),
        "validation_file": str(tmp_path / "dev.jsonl"), "class_names": ["negative", "positive"],
        "max_length": 24, "output_dir": str(tmp_path / "out"), "target_epsilon": 8,
        "expected_batch_size": 8, "max_steps": 3, "learning_rate": "1e-3", "save_strategy": "no",
        "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(values))
    return config


@pytest.fixture
def of_tables(tmp_path, monkeypatch) -> Callable[..., Path]:
    """A function that writes a configuration of a tiny GPT-2 on so many of the built-in tables."""

    def write(count: int, **values: Any) -> Path:
        import tiny_text

        place = "hf_dp.tasks.generation.formats.demo_tables"
        monkeypatch.setattr(place, lambda *_: tiny_text.tables(count))
        values = {
            "task": "causal_lm", "model_name_or_path": tiny_text.saved(tmp_path / "model", tiny_text.gpt2()),
            "dataset_name": "demo", "data_format": "e2e", "max_length": 150, "output_dir": str(tmp_path / "out"),
            "accountant": "rdp", "max_steps": 2, "learning_rate": "1e-2", "save_strategy": "no", "use_cpu": True,
            "disable_tqdm": True, "dataloader_pin_memory": False, **values,
        }  # fmt: skip
        config = tmp_path / "run.yaml"
        config.write_text(yaml.safe_dump(values))
        return config

    return write


@pytest.fixture
def refused(capsys) -> Callable[[list[str], str], None]:
    """Run a command that is refused with these words."""

    def check(words: list[str], message: str) -> None:
        assert main(words) == 2
        assert message in capsys.readouterr().err

    return check
