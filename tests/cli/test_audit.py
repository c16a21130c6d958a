"""``hf-dp audit exposure`` on the built-in tables."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hf_dp.cli.main import main


@pytest.fixture
def task(of_tables) -> Path:
    steady = {"lr_scheduler_type": "constant", "logging_strategy": "no"}
    return of_tables(24, target_epsilon=2, expected_batch_size=12, **steady)


def audit(task: Path, *words: str) -> int:
    return main(["audit", "exposure", "--config", str(task), *words])


def test_a_private_model_says_what_is_in_it_and_is_measured_again_alike(task, capsys):
    words = ["--candidates", "200"]
    assert audit(task, *words, "--repetitions", "2", "--canaries", "2") == 0
    folder = task.parent / "out_exposure" / "dp_sgd_r2"
    printed = capsys.readouterr().out
    assert printed.strip().splitlines()[-1] == str(folder / "exposure.json")
    assert "A canary of r rows has r times as much" in printed

    inserted = json.loads((folder / "canaries.json").read_text())
    assert inserted["repetitions"] == 2 and len(inserted["canaries"]) == 2
    stated = json.loads((folder / "privacy.json").read_text())
    assert stated["statement"]["num_examples"] == 24 + 4
    assert stated["statement"]["status"] == "proven"
    card = (folder / "README.md").read_text()
    assert "canaries-inserted" in card and "with 4 inserted rows of canaries" in card

    found = json.loads((folder / "exposure.json").read_text())
    assert found["exact"] is None and found["epsilon"] == stated["statement"]["epsilon"]
    assert found["skew_normal"]["mean"] < found["mean_exposure_that_epsilon_allows"]
    assert audit(task, *words, "--trained", str(folder), "--exact") == 0
    again = json.loads((folder / "exposure.json").read_text())
    for one, other in zip(found["canaries"], again["canaries"], strict=True):
        assert one["skew_normal"]["exposure"] == pytest.approx(
            other["skew_normal"]["exposure"], rel=1e-4
        )
        assert other["exact"]["size"] == 100_000

    assert audit(task, "--repetitions", "2") == 2
    assert f"--trained {folder}" in capsys.readouterr().err


def test_without_privacy_a_repeated_canary_is_learned_by_heart(task, capsys):
    words = ["--privacy_mode", "non_private", "--max_steps", "40", "--canaries", "1"]
    words += ["--max_train_rows", "4", "--candidates", "200", "--exact"]
    assert audit(task, *words, "--repetitions", "20") == 0
    said = capsys.readouterr()
    assert "without" in said.err and "target_epsilon 2" in said.err
    folder = task.parent / "out_exposure" / "non_private_r20"
    found = json.loads((folder / "exposure.json").read_text())
    assert found["epsilon"] is None and "states no privacy" in found["claim"]
    assert found["exact"]["mean"] > math.log2(100_000) - 4
    assert found["exact"]["standard_deviation"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--repetitions", "1", "--task", "seq2seq"], "'seq2seq': an encoder-decoder"),
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
def test_what_cannot_be_audited_is_named_before_anything_is_written(task, capsys, words, message):
    given = [word.format(model=task.parent / "model") for word in words]
    assert audit(task, *given) == 2
    assert message in capsys.readouterr().err
    assert not (task.parent / "out_exposure").exists()


def test_an_unknown_audit_is_named(task, capsys, refused):
    refused(["audit", "exposre", "--config", str(task)], "Did you mean 'exposure'")
    with pytest.raises(SystemExit):
        main(["audit", "--help"])
    assert "--repetitions" in capsys.readouterr().out
