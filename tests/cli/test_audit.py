"""``hf-dp audit exposure`` on the built-in tables, and ``hf-dp audit run`` on the tiny task."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from recipe import Recipe

from hf_dp.audit.exposure import most_exposed
from hf_dp.cli.audit import table
from hf_dp.cli.main import main
from hf_dp.statement.evidence import read


@pytest.fixture
def writing(of_tables) -> Recipe:
    steady = {"lr_scheduler_type": "constant", "logging_strategy": "no"}
    return of_tables(24, target_epsilon=2, expected_batch_size=12, **steady)


def exposure(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "exposure.json").read_text())


def test_epsilon_has_three_digits_in_the_table():
    fit = {"extrapolated": False, "distance": 0.1, "sample": 4096, "exposure": 1.0}
    report = {
        "model": "m", "epsilon": 2.9964, "mean_exposure_that_epsilon_allows": None,
        "repetitions": 1, "space": 100_000, "exact": None, "canaries": [{"skew_normal": fit}],
        "skew_normal": {"mean": 1.0, "standard_deviation": None},
    }  # fmt: skip
    assert table([report]).splitlines()[2].split()[:3] == ["m", "2.996", "1"]


def test_a_private_model_says_what_is_in_it_and_is_measured_again_alike(writing):
    words = ["--candidates", "200"]
    printed = writing.run("audit exposure", *words, "--repetitions", "2", "--canaries", "2")
    folder = writing.folder / "out_exposure" / "dp_sgd_r2"
    assert printed.strip().splitlines()[-1] == str(folder / "exposure.json")
    assert "A canary of r rows has r times as much" in printed

    inserted = json.loads((folder / "canaries.json").read_text())
    assert inserted["repetitions"] == 2 and len(inserted["canaries"]) == 2
    stated = json.loads((folder / "privacy.json").read_text())["statement"]
    assert (stated["num_examples"], stated["status"]) == (24 + 4, "proven")
    card = (folder / "README.md").read_text()
    assert "canaries-inserted" in card and "with 4 inserted rows of canaries" in card

    found = exposure(folder)
    assert found["exact"] is None and found["epsilon"] == stated["epsilon"]
    allowed = most_exposed(found["epsilon"], found["delta"], 2, found["space"])
    assert found["mean_exposure_that_epsilon_allows"] == pytest.approx(allowed)
    writing.run("audit exposure", *words, "--trained", str(folder), "--exact")
    for one, other in zip(found["canaries"], exposure(folder)["canaries"], strict=True):
        before, after = (each["skew_normal"]["exposure"] for each in (one, other))
        assert after == pytest.approx(before, rel=1e-4) and other["exact"]["size"] == 100_000
    writing.refused(f"--trained {folder}", "audit exposure", "--repetitions", "2")


def test_without_privacy_a_repeated_canary_is_learned_by_heart(writing):
    words = "--privacy_mode non_private --max_steps 40 --canaries 1 --max_train_rows 4"
    words += " --candidates 200 --exact --repetitions 20"
    writing.run("audit exposure", *words.split())
    assert "without" in writing.said and "target_epsilon 2" in writing.said
    found = exposure(writing.folder / "out_exposure" / "non_private_r20")
    assert found["epsilon"] is None and "states no privacy" in found["claim"]
    assert found["exact"]["mean"] > math.log2(100_000) - 4
    assert found["exact"]["standard_deviation"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repetitions", "1", "--task", "seq2seq"], "got the task 'seq2seq'"),
        (["--repetitions", "1", "--task", "text_classification"], "'text_classification'"),
        (["--repetitions", "1", "0"], "Expected `repetitions` to be a whole number >= 1, got 0"),
        (["--repetitions", "1", "--candidates", "5"], "candidates"),
        (["--repetitions", "1", "--canaries", "0"], "canaries"),
        (["--repetitions", "1", "--data_format", "dart"], "'dart'"),
        (["--repetitions", "1", "--push_to_hub", "True"], "push_to_hub"),
        (["--repetitions", "1", "--trained", "x"], "got both"),
        ([], "got neither"),
        (["--trained", "{model}"], "no canaries.json"),
    ],
)
def test_what_cannot_be_audited_is_named_before_anything_is_written(writing, words, message):
    given = [word.format(model=writing.folder / "model") for word in words]
    writing.refused(message, "audit exposure", *given)
    assert not (writing.folder / "out_exposure").exists()


def test_an_unknown_audit_is_named(writing, capsys):
    writing.refused("Did you mean 'exposure'", "audit exposre")
    with pytest.raises(SystemExit):
        main(["audit", "--help"])
    assert "--repetitions" in capsys.readouterr().out


# -- in one run ---


def test_a_recipe_is_audited_beside_its_own_folder(task):
    printed = task.run("audit run", "--audit_canaries", "40")
    folder = task.folder / "out_audit"
    assert printed.strip().splitlines()[-1] == str(folder)
    assert "guesses about 40 canaries were right" in printed and "never proves one" in printed
    record = read(folder)
    assert record.plan.num_examples == 80
    assert record.facts.audit.scores == "gradients"
    assert main(["verify", str(folder)]) == 0


def test_other_scores_and_folder(task):
    folder = task.folder / "other"
    task.change(audit_canaries=20)  # of the recipe
    words = f"--audit_scores losses --output-dir {folder} --max_steps 2"
    assert "guesses about 20 canaries were right" in task.run("audit run", *words.split())
    assert read(folder).facts.audit.scores == "losses"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--audit_canaries", "0"], "audit_canaries"),
        (["--privacy_mode", "non_private"], "audit_canaries"),
        (["--release", "training_loss"], "with release="),
    ],
)
def test_runs_that_cannot_be_audited_are_one_line(words, message, task):
    task.refused(message, "audit run", *words)
    assert not (task.folder / "out_audit").exists()


def test_help_of_audit_run(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["audit", "run", "--help"])
    assert stop.value.code == 0 and "hf-dp audit run --config" in capsys.readouterr().out
