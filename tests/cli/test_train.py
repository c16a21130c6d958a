"""``hf-dp train``, YAML and command line, on files; in process and through ``accelerate
launch``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import yaml

from hf_dp.cli.config import check_keys, peft_config, read_yaml
from hf_dp.cli.main import main
from hf_dp.errors import ConfigError
from hf_dp.trainer.trainer import DPTrainer

ROOT = Path(__file__).parent.parent.parent


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


def test_train_prints_accuracy_epsilons_and_last_the_folder(task, capsys):
    assert main(["train", "--config", str(task)]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    out = task.parent / "out"
    assert lines[-1] == str(out)
    text = "\n".join(lines)
    assert "accuracy on the 20 evaluation rows" in text
    for accountant in ("pld", "rdp", "prv", "gdp_clt"):
        assert accountant in text
    assert {"README.md", "privacy.json", "model.safetensors", "config.json"} <= {
        p.name for p in out.iterdir()
    }
    assert str(task.parent) not in (out / "README.md").read_text()
    assert json.loads((out / "config.json").read_text())["id2label"] == {
        "0": "negative",
        "1": "positive",
    }


def test_the_command_line_wins_and_hyphens_are_accepted(task, capsys):
    assert (
        main(["train", "--config", str(task), "--max-steps", "2", "--expected_batch_size=10"]) == 0
    )
    plan = json.loads((task.parent / "out" / "privacy.json").read_text())["plan"]
    assert (plan["steps"], plan["expected_batch_size"]) == (2, 10)


@pytest.mark.parametrize(
    ("bf16", "longest", "multiple"), [("True", 24, 8), ("True", 23, None), ("False", 24, None)]
)
def test_in_bf16_rows_are_padded_to_few_lengths(task, bf16, longest, multiple, monkeypatch):
    seen = []
    monkeypatch.setattr(
        DPTrainer, "train", lambda self, **_: seen.append(self.data_collator) or sys.exit(0)
    )
    with pytest.raises(SystemExit):
        main(["train", "--config", str(task), "--bf16", bf16, "--max_length", str(longest)])
    assert [collator.pad_to_multiple_of for collator in seen] == [multiple]


def test_a_lora_block(task, capsys):
    values = yaml.safe_load(task.read_text())
    values["peft"] = {"peft_type": "lora", "r": 2, "target_modules": ["query", "value"]}
    task.write_text(yaml.safe_dump(values))
    assert main(["train", "--config", str(task)]) == 0
    assert (task.parent / "out" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rat": 1}, "`learning_rat` .did you mean `learning_rate`"),
        ({"peft": {"peft_type": "lorra"}}, "`peft.peft_type` to be one of"),
        ({"peft": {"peft_type": "lora", "rank": 2}}, "Unknown configuration key `rank`"),
        ({"train_file": "nowhere.jsonl"}, "'nowhere.jsonl' does not exist"),
        ({"train_file": "data.xlsx"}, r"ending in .*got 'data.xlsx'"),
        (
            {"text_columns": ["text"]},
            r"`text_columns` names \['text'\], but the data has the columns",
        ),
        ({"label_column": "target"}, r"`label_column` names \['target'\]"),
        ({"class_names": []}, "declares no class names"),
        ({"class_names": ["only"]}, "`class_names` to name at least two"),
        ({"class_names": ["bad", "good", "bad"]}, "`class_names` to name at least two different"),
        ({"dataset_name": "imdb"}, "`dataset_name` or files, got dataset_name 'imdb'"),
        (
            {"dataset_name": "no/such", "train_file": None, "validation_file": None},
            "'no/such' .* could not be loaded",
        ),
        ({"validation_file": []}, "`validation_file` .* to be given"),
        ({"max_train_rows": 41}, "`max_train_rows` to be from 1 to 40, got 41"),
        ({"metrics": ["bleu"]}, "`metrics` to be one of"),
        ({"max_length": 2}, "`max_length` to be above 2"),
        ({"text_columns": ["a", "b", "c"]}, "`text_columns` to name one or two columns"),
        ({"target_epsilon": None}, "target_epsilon"),
        ({"target_epsilon": -1}, "target_epsilon"),
        ({"expected_batch_size": 100}, r"at most num_examples \(40\)"),
        ({"privacy_mode": "dpsgd"}, "privacy_mode"),
        ({"fp16": True}, "fp16"),
        ({"model_name_or_path": "package:no_such_package"}, "pip install"),
        ({"model_name_or_path": "no/such-model"}, "'no/such-model' could not be loaded"),
        ({"freeze": ["encoder.wrong"]}, "`freeze` names 'encoder.wrong'"),
        ({"task": "translation"}, "`task` to be one of"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(task, capsys, change, message):
    values = yaml.safe_load(task.read_text()) | change
    task.write_text(yaml.safe_dump({k: v for k, v in values.items() if v is not None}))
    assert main(["train", "--config", str(task)]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert "Traceback" not in error
    assert not (task.parent / "out").exists()


def test_unreadable_files(task, capsys):
    (task.parent / "train.jsonl").write_text("{not json")
    assert main(["train", "--config", str(task)]) == 2
    assert "could not be read as json" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="cannot be read"):
        read_yaml(str(task.parent / "none.yaml"))
    task.write_text("a: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_yaml(str(task))
    task.write_text("- 1")
    with pytest.raises(ConfigError, match="mapping"):
        read_yaml(str(task))


def test_every_unknown_key_is_reported():
    with pytest.raises(ConfigError, match="`foo`.*`bar`"):
        check_keys({"foo": 1, "bar": 2}, {"baz"})
    assert peft_config(None) is None


def test_help_is_quick_and_has_an_example():
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "hf_dp.cli.main", "train", "--help"], capture_output=True, text=True
    )
    assert time.perf_counter() - start < 2
    assert "example:" in done.stdout
    assert done.returncode == 0


def test_accelerate_launch_runs_the_same_main(task):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    done = subprocess.run(
        [*command, str(ROOT / "recipes" / "text_classification.py"), "--config", str(task)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().splitlines()[-1] == str(task.parent / "out")
