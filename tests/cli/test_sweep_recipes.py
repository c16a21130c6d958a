"""A sweep over several recipes: which runs there are, and what each of them reads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from hf_dp.cli import cells
from hf_dp.cli.cells import grid
from hf_dp.cli.main import main
from hf_dp.errors import ConfigError


@pytest.fixture
def recipes(task) -> dict[str, Path]:
    """Two recipes in one folder, the second with LoRA and a rate of its own."""
    values = yaml.safe_load(task.read_text())
    lora = {"peft_type": "lora", "r": 2, "lora_alpha": 2}
    found = {"full": values, "lora": {**values, "peft": lora, "learning_rate": 6e-3}}
    paths = {name: task.parent / f"{name}.yaml" for name in found}
    for name, path in paths.items():
        path.write_text(yaml.safe_dump(found[name]))
    return paths


@pytest.fixture
def children(monkeypatch) -> list[dict]:
    """The files of the runs that a sweep starts; none trains."""
    read: list[dict] = []

    def child(command, **options):
        config = Path(command[command.index("--config") + 1])
        read.append(yaml.safe_load(config.read_text()) | {"folder": config.parent})
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(cells.subprocess, "run", child)
    return read


def sweep(recipes, folder, *words):
    paths = [str(path) for path in recipes]
    return main(["sweep", "--config", *paths, "--output-dir", str(folder), *words])


def test_each_recipe_runs_with_its_own_settings_over_the_same_grid(recipes, children, tmp_path):
    words = ["--grid", "target_epsilon=2,8", "--seeds", "0", "1", "--set", "max_steps=5"]
    assert sweep(recipes.values(), tmp_path / "s", *words) == 1  # no child left a result
    found = [
        (run["learning_rate"], run["target_epsilon"], run["seed"], "peft" in run)
        for run in children
    ]
    assert found == [
        (rate, epsilon, seed, lora)
        for rate, lora in ((1e-3, False), (6e-3, True))
        for epsilon in (2, 8)
        for seed in (0, 1)
    ]
    assert {run["max_steps"] for run in children} == {5}
    assert all("recipe" not in run for run in children)
    assert {run["card"]["recipe"] for run in children} == {"full.yaml", "lora.yaml"}
    names = {run["folder"].name.rpartition("-")[0].rpartition("-")[0] for run in children}
    assert names == {
        f"recipe={name}-target_epsilon={target}" for name in ("full", "lora") for target in (2, 8)
    }


def test_one_recipe_needs_no_name(recipes, children, tmp_path):
    assert sweep([recipes["full"]], tmp_path / "s", "--grid", "max_steps=5") == 1
    assert children[0]["folder"].name.startswith("max_steps=5-")
    assert children[0]["card"] == {"recipe": "full.yaml"}


def test_recipes_of_one_name_are_told_apart_by_their_folders(recipes, children, tmp_path):
    (tmp_path / "other").mkdir()
    twin = tmp_path / "other" / "full.yaml"
    twin.write_bytes(recipes["full"].read_bytes())
    sweep([recipes["full"], twin], tmp_path / "s")
    assert [run["folder"].name.split("-")[0] for run in children] == [
        "recipe=full",
        "recipe=other_full",
    ]


def test_numbers_with_an_exponent_are_numbers(tmp_path):
    """PyYAML takes 1e-3 for text: such rates would be no axis, and 0.001 another value."""
    (first, _) = grid(["learning_rate=1e-3,2E+1", "peft={r: 1e0}"], [0], tmp_path)
    assert first.settings == {"learning_rate": 1e-3, "peft": {"r": 1.0}}
    for words in ("learning_rate=1e-3,0.001", "target_epsilon=1,1.0"):
        with pytest.raises(ConfigError, match="to be different from each other"):
            list(grid([words], [0], tmp_path))
    assert len(list(grid(["a=1,true,1x3,e-3"], [0], tmp_path))) == 4


@pytest.mark.parametrize(
    ("names", "words", "message"),
    [
        (("full", "full"), [], "to have different names, got"),
        (("lora", "full"), ["--grid", "peft.r=1,2"], "no block `peft`"),  # the second has none
        (("full", "lora"), ["--grid", "recipe=a,b"], "use --config A.yaml B.yaml"),
        (("full", "lora"), ["--set", "recipe=a"], "use --config A.yaml B.yaml"),
        (
            ("full", "lora"),
            ["--private-selection", "3", "--score", "accuracy"],
            "one recipe in `--config`",
        ),
    ],
)
def test_what_is_refused_before_the_first_run(
    recipes, children, tmp_path, capsys, names, words, message
):
    assert sweep([recipes[name] for name in names], tmp_path / "s", *words) == 2
    assert message in capsys.readouterr().err
    assert not children


def test_each_example_of_the_help_stands_on_lines_of_its_own(capsys):
    with pytest.raises(SystemExit):
        main(["sweep", "--help"])
    said = capsys.readouterr().out
    assert "privacy_mode=dp_sgd,non_private target_epsilon=3,8 \\\n" in said
    assert max(map(len, said.splitlines())) <= 100
