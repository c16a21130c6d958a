"""A recipe of the tiny task, for tests of the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import yaml


@pytest.fixture
def task(tmp_path) -> Path:
    """A configuration file of the tiny task, with a model folder and data files beside it."""
    tiny.model().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    for name, part in (("train", tiny.rows(40)), ("dev", tiny.held_out_rows())):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    values = {
        "task": "text_classification",
        "model_name_or_path": str(tmp_path / "model"),
        "train_file": str(tmp_path / "train.jsonl"),
        "validation_file": str(tmp_path / "dev.jsonl"),
        "class_names": ["negative", "positive"],
        "max_length": 24,
        "output_dir": str(tmp_path / "out"),
        "target_epsilon": 8,
        "expected_batch_size": 8,
        "max_steps": 3,
        "learning_rate": "1e-3",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(values))
    return config
