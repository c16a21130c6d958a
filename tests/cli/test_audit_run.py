"""``hf-dp audit run`` on the tiny task."""

from __future__ import annotations

import pytest

from hf_dp.cli.main import main
from hf_dp.statement.record import read


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
    words = f"--audit_scores losses --audit_canaries 20 --output-dir {folder} --max_steps 2"
    task.run("audit run", *words.split())
    assert read(folder).facts.audit.scores == "losses"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--audit_canaries", "0"], "audit_canaries"),
        (["run", "--privacy_mode", "non_private"], "audit_canaries"),
        (["run", "--release", "training_loss"], "with release="),
        (["something"], "exposure"),
    ],
    ids=str,
)
def test_what_cannot_be_audited_is_one_line(words, message, task):
    task.refused(message, f"audit {words[0]}", *words[1:])
    assert not (task.folder / "out_audit").exists()


def test_help(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["audit", "run", "--help"])
    assert stop.value.code == 0 and "hf-dp audit run --config" in capsys.readouterr().out
