"""Recipes of tiny tasks, for tests of the command line."""

from collections.abc import Callable
from typing import Any

import pytest
import tiny
from recipe import Recipe

from hf_dp.cli.main import main


@pytest.fixture
def task(tmp_path, capsys) -> Recipe:
    """A recipe that classifies the tiny task's sentences."""
    tiny.model().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    made = Recipe(
        tmp_path, capsys, task="text_classification", model_name_or_path=str(tmp_path / "model"),
        class_names=["negative", "positive"], max_length=24, target_epsilon=8, accountant="rdp",
        expected_batch_size=8, max_steps=3, learning_rate="1e-3",
    )  # fmt: skip
    train, dev = (
        made.lines("train.jsonl", tiny.rows(40)),
        made.lines("dev.jsonl", tiny.held_out_rows()),
    )
    made.change(train_file=train, validation_file=dev)
    return made


@pytest.fixture
def of_tables(tmp_path, monkeypatch, capsys) -> Callable[..., Recipe]:
    """A function that makes a recipe of a tiny GPT-2 on so many of the built-in tables."""

    def make(count: int, **values: Any) -> Recipe:
        import tiny_text

        place = "hf_dp.tasks.generation.arguments.demo_tables"
        monkeypatch.setattr(place, lambda *_: tiny_text.tables(count))
        model = tiny_text.saved(tmp_path / "model", tiny_text.gpt2())
        return Recipe(
            tmp_path, capsys, task="causal_lm", model_name_or_path=model, dataset_name="demo",
            data_format="e2e", max_length=150, accountant="rdp", max_steps=2,
            learning_rate="1e-2", **values,
        )  # fmt: skip

    return make


@pytest.fixture
def refused(capsys) -> Callable[[list[str], str], None]:
    """Run a command that is refused with these words."""

    def check(words: list[str], message: str) -> None:
        assert main(words) == 2
        assert message in capsys.readouterr().err

    return check
