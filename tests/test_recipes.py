"""Every recipe parses, by the task it names, and spends what its first lines say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from hf_dp.cli.config import parse, read_yaml
from hf_dp.cli.tasks.classification_data import DataArguments
from hf_dp.cli.tasks.masked_lm import PretrainingArguments
from hf_dp.cli.tasks.text_classification import ModelArguments
from hf_dp.errors import ConfigError
from hf_dp.trainer.arguments import DPTrainingArguments

ROOT = Path(__file__).parent.parent
RECIPES = {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "recipes").rglob("*.yaml"))}
RECIPES = {name: path for name, path in RECIPES.items() if "accelerate" not in name}
GIVEN_BY_THE_USER = {"text_files": ["a.parquet"]}
ARGUMENTS: dict[str, list[type]] = {
    "text_classification": [ModelArguments, DataArguments, DPTrainingArguments],
    "masked_lm": [PretrainingArguments, TrainingArguments],
}


def parsed(values: dict[str, Any]) -> tuple[Any, ...]:
    values = {**values, "use_cpu": True}
    if values["task"] == "masked_lm":
        values |= GIVEN_BY_THE_USER
    return parse(ARGUMENTS[values["task"]], values, [], prog="", extra=("task", "peft"))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_parses_and_refuses_an_unknown_key(name):
    values = read_yaml(str(RECIPES[name]))
    *_, args = parsed(values)
    assert args.output_dir.startswith("outputs/")
    with pytest.raises(ConfigError, match="leaning_rate.*did you mean `learning_rate`"):
        parsed({**values, "leaning_rate": 1})
