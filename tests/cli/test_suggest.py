"""``hf-dp suggest`` as a user calls it."""

import json
import re

import pytest
import tiny
import yaml

SST2 = ["suggest", "--num-examples", "67349", "--target-epsilon", "3"]


@pytest.fixture
def recipe(tmp_path):
    """A recipe whose model is a folder with a configuration and no weights."""
    tiny.model().config.save_pretrained(tmp_path / "model")
    values = {
        "model_name_or_path": str(tmp_path / "model"), "train_file": "rows.csv",
        "max_train_rows": 5000, "max_length": 8, "per_device_train_batch_size": 4,
        "target_epsilon": 8, "expected_batch_size": 32, "num_train_epochs": 9,
        "learning_rate": 5e-5,
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_what_is_printed_is_yaml_with_a_reason_above_each_setting(printed):
    out = printed(*SST2, "--parameters", "22700000")
    found = yaml.safe_load(out)
    assert found["expected_batch_size"] == 1024 and found["max_steps"] == 198
    first = out.split("\n\n")[0]
    assert "67,349 examples, epsilon 3 at delta 7.424e-06 (pld)" in first
    for block in out.strip().split("\n\n")[1:]:
        assert block.startswith("# ") and not block.splitlines()[-1].startswith("#")
    assert max(map(len, out.splitlines())) <= 100


def test_the_epochs_of_a_run_are_one_number(printed):
    """The batch is rounded, so those of the rules are others: 24.8, and asked for were 2."""
    words = ["suggest", "--num-examples", "1300", "--target-epsilon", "8"]
    assert re.findall("[^ ]+ [^ ]+ epochs", printed(*words)) == ["rate), 24.7 epochs"]
    assert "1.98 epochs" in (out := printed(*words, "--num_train_epochs", "2"))
    assert "About 2 epochs at this batch size" in out
    assert "by default 1/(2 x 1,300 rows)" in " ".join(out.replace("#", "").split())


def test_json(printed):
    found = json.loads(printed(*SST2, "--json"))
    assert found["settings"]["max_steps"] == found["plan"]["steps"] == 198
    assert set(found["settings"]) == set(found["reasons"])
    assert found["effective_noise_multiplier"] == pytest.approx(
        found["plan"]["noise_multiplier"] * 67349 / 1024
    )


def test_a_recipe_gives_its_data_and_model(recipe, printed, refused, tmp_path):
    new = tmp_path / "new.yaml"
    words = ["suggest", "--config", str(recipe), "--num_train_epochs", "2", "--output", str(new)]
    out = printed(*words)
    assert "5,000 examples, epsilon 8" in out and "The recipe has 32." in out
    # What trains was counted.
    assert "At best the gradients add up to" in " ".join(out.replace("#", "").split())
    before, after = yaml.safe_load(recipe.read_text()), yaml.safe_load(new.read_text())
    assert "num_train_epochs" not in after
    assert after["learning_rate"] > 1e-4 and after["train_file"] == before["train_file"]
    assert after["max_steps"] * after["expected_batch_size"] == pytest.approx(10_000, rel=0.05)
    refused(words, "`--output`")  # the file is there
    # The new file is a recipe: hf-dp plan reads it.
    planned = json.loads(printed("plan", "--config", str(new), "--json"))["plan"]
    assert planned["steps"] == after["max_steps"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--target-epsilon", "3"], "--num-examples"),
        (["--num-examples", "100"], "--target_epsilon"),
        (SST2[1:] + ["--output", "x.yaml"], "--config"),
        (SST2[1:] + ["--num_train_epochs", "-1"], "epochs"),
    ],
)
def test_bad_input(words, said, refused):
    refused(["suggest", *words], said)


def test_data_on_the_command_line_and_what_is_chosen(recipe, printed, refused):
    words = ["suggest", "--config", str(recipe)]
    assert "3,000 examples, epsilon 8" in printed(*words, "--max_train_rows", "3000")
    refused([*words, "--learning_rate", "1e-3"], "`--learning_rate` is what hf-dp suggest chooses")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("privacy_mode: dp_fp", "hf-dp suggest plans dp_sgd only"),
        ("bands: 8", "`bands` to be left out"),
        ("clipping_quantile: 0.5", "`clipping_quantile` to be left"),
        ("max_logical_batch_size: 300", "`max_logical_batch_size` to be left out"),
    ],
)
def test_what_is_not_suggested_for_is_refused(recipe, refused, line, said):
    recipe.write_text(f"{recipe.read_text()}{line}\n")
    refused(["suggest", "--config", str(recipe)], said)
