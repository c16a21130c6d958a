"""Recipes of tiny tasks, for tests of the command line."""

import shutil
import subprocess
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_text
from recipe import Recipe

from hf_dp.cli import cells
from hf_dp.cli.main import main
from hf_dp.run.clock import VARIABLE


@pytest.fixture(scope="session")
def classifier(tmp_path_factory) -> Path:
    """A folder with the tiny task's model."""
    return tiny.save(tmp_path_factory.mktemp("bases") / "classifier")


@pytest.fixture
def task(classifier, tmp_path, capsys) -> Recipe:
    """A recipe that classifies the tiny task's sentences."""
    model = str(shutil.copytree(classifier, tmp_path / "model"))
    made = Recipe(
        tmp_path, capsys, task="text_classification", model_name_or_path=model,
        class_names=["negative", "positive"], max_length=24, target_epsilon=8, accountant="rdp",
        expected_batch_size=8, max_steps=3, learning_rate="1e-3",
    )  # fmt: skip
    dev = made.lines("dev.jsonl", tiny.held_out_rows())
    made.change(train_file=made.lines("train.jsonl", tiny.rows(40)), validation_file=dev)
    return made


@pytest.fixture(scope="session")
def writer(tmp_path_factory) -> str:
    """A folder with a tiny GPT-2."""
    return tiny_text.saved(tmp_path_factory.mktemp("bases") / "writer", tiny_text.gpt2())


@pytest.fixture
def of_tables(writer, tmp_path, monkeypatch, capsys) -> Callable[..., Recipe]:
    """A function that makes a recipe of a tiny GPT-2 on so many of the built-in tables."""

    def make(count: int, **values: Any) -> Recipe:
        place = "hf_dp.tasks.generation.arguments.demo_tables"
        monkeypatch.setattr(place, lambda *_: tiny_text.tables(count))
        model = str(shutil.copytree(writer, tmp_path / "model"))
        return Recipe(
            tmp_path, capsys, task="causal_lm", model_name_or_path=model, dataset_name="demo",
            data_format="e2e", max_length=150, accountant="rdp", max_steps=2,
            learning_rate="1e-2", **values,
        )  # fmt: skip

    return make


@pytest.fixture
def children(monkeypatch) -> list[list[str]]:
    """The commands of the runs that a sweep starts; none trains."""
    found: list[list[str]] = []

    def child(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        found.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(cells.subprocess, "run", child)
    return found


@pytest.fixture
def in_this_process(monkeypatch) -> None:
    """Let the runs of a sweep train in this process, where hf_dp is imported already."""

    def child(command: list[str], stdout: Any, env: dict[str, str], **options: Any) -> Any:
        words = command[command.index("hf_dp.cli.main") + 1 :]
        with monkeypatch.context() as patched, redirect_stdout(stdout), redirect_stderr(stdout):
            patched.setenv(VARIABLE, env[VARIABLE])
            return subprocess.CompletedProcess(command, main(words))

    monkeypatch.setattr(cells.subprocess, "run", child)


@pytest.fixture
def printed(capsys) -> Callable[..., str]:
    """Run a command that succeeds; return what it prints."""

    def run(*words: str) -> str:
        assert main(list(words)) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys) -> Callable[[list[str], str], None]:
    """Run a command that is refused in one line with these words, and prints nothing."""

    def check(words: list[str], message: str) -> None:
        capsys.readouterr()
        assert main(words) == 2
        printed, said = capsys.readouterr()
        assert message in said and len(said.splitlines()) == 1 and printed == ""

    return check
