"""Names that no command knows: found at once, with the nearest that it knows."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

import hf_dp
from hf_dp.cli import config, main
from hf_dp.cli.config import check_early, training_arguments
from hf_dp.cli.tasks import check_recipe
from hf_dp.cli.tasks.classification import TEXTS
from hf_dp.errors import ConfigError
from hf_dp.trainer.arguments import DPTrainingArguments

# Words, or a configuration file, and what is said of them.
TYPOS = [
    (["train", "--learnin_rate", "1"], "`learnin_rate` (did you mean `learning_rate`?)"),
    (["train", "--learnin-rate=1"], "`learnin_rate` (did you mean `learning_rate`?)"),
    (["train", "--config", "FILE"], "`traget_epsilon` (did you mean `target_epsilon`?)"),
    (["train", "--confg", "FILE"], "`confg` (did you mean `config`?)"),
    (["eval", "--config", "FILE"], "`traget_epsilon` (did you mean `target_epsilon`?)"),
    (["eval", "--label_colum", "x"], "`label_colum` (did you mean `label_column`?)"),
    (["plan", "--config", "FILE"], "`traget_epsilon` (did you mean `target_epsilon`?)"),
]
IN_A_FRESH_PROCESS = """
import json, sys
from hf_dp.cli.main import main
codes = [main(words) for words in json.loads(sys.argv[1])]
print(json.dumps([codes, sorted({"transformers", "torch"} & sys.modules.keys())]))
"""


def test_unknown_names_are_found_before_transformers_is_imported(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text("traget_epsilon: 3\n")
    words = [[str(file) if word == "FILE" else word for word in given] for given, _ in TYPOS]
    given = [sys.executable, "-c", IN_A_FRESH_PROCESS, json.dumps(words)]
    done = subprocess.run(given, capture_output=True, text=True, check=True)
    codes, imported = json.loads(done.stdout)
    assert codes == [2] * len(TYPOS)
    assert "transformers" not in imported
    said = done.stderr.splitlines()
    for line, (_, expected) in zip(said, TYPOS, strict=True):
        assert expected in line


def test_the_names_read_from_source_are_those_of_the_class():
    assert training_arguments() == {field.name for field in dataclasses.fields(DPTrainingArguments)}


def test_known_names_pass_in_every_form():
    words = ["--learning-rate", "-1", "--no_dataloader_pin_memory", "--bf16=True", "--help"]
    check_early({"peft": {}, "card": {}, "task": "x", "data_seed": 1}, words, TEXTS.ARGUMENTS)


def test_planted_names_that_are_not_looked_for_are_seen(monkeypatch):
    monkeypatch.setattr(config, "check_names", lambda *given: None)
    check_recipe({"traget_epsilon": 3})
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="target_epsilon"):
        check_recipe({"traget_epsilon": 3})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["plan", "--traget-epsilon", "1"], "(did you mean `target_epsilon`?)"),
        (
            "account epsilon --noise-multiplier 1 --sample-rate 0.1 --steps 1 --delta 1e-5 --jsn".split(),
            "(did you mean `json`?)",  # an option of the question, not of the command
        ),
    ],
)
def test_the_nearest_command_and_option_are_named(words, expected, capsys):
    try:
        code = main.main(words)
    except SystemExit as end:
        code = end.code
    assert code == 2 and expected in capsys.readouterr().err


def test_version(capsys):
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"hf-dp {hf_dp.__version__}\n"
