"""``hf-dp audit run`` and ``hf-dp audit leave-one-out`` on the tiny task."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

import hf_dp.clipping.clipped_sum as clipped_sum
from hf_dp.cli import audit
from hf_dp.cli.main import main
from hf_dp.features.canaries import Canaries
from hf_dp.statement.record import read


def test_a_recipe_is_audited_beside_its_own_folder(task, capsys):
    assert main(["audit", "run", "--config", str(task), "--audit_canaries", "40"]) == 0
    folder = task.parent / "out_audit"
    printed = capsys.readouterr().out
    assert printed.strip().splitlines()[-1] == str(folder)
    assert "guesses about 40 canaries were right" in printed and "never proves one" in printed
    record = read(folder)
    assert record.plan.num_examples == 80
    assert record.facts.audit.scores == "gradients"
    assert main(["verify", str(folder)]) == 0


def test_other_scores_and_folder(task, capsys):
    words = [
        "--audit_scores", "losses", "--audit_canaries", "20", "--output-dir",
        str(task.parent / "other"),
    ]  # fmt: skip
    assert main(["audit", "run", "--config", str(task), *words, "--max_steps", "2"]) == 0
    assert read(task.parent / "other").facts.audit.scores == "losses"


def test_leave_one_out_reports_what_its_runs_tell(task, capsys, refused):
    words = ["--runs", "10", "--max_steps", "1"]
    assert main(["audit", "leave-one-out", "--config", str(task), *words]) == 0
    folder = task.parent / "out_leave_one_out"
    report = json.loads((folder / audit.LEFT_OUT).read_text())
    assert (report["runs"], report["canaries"], report["scores"]) == (10, 10, "directions")
    assert 0 <= report["correct"] <= report["guesses"] <= 10
    assert read(folder / "run_9").plan.num_examples == 41
    assert "in each of 10 runs" in capsys.readouterr().out
    refused(["audit", "leave-one-out", "--config", str(task), *words], "is not empty")


def test_planted_missing_clipping_is_an_error_of_leave_one_out(task, refused, monkeypatch):
    """Each row's gradient enters with its whole length, thousands of times C. (All rows are in
    each step, so that the others differ little between runs; and coins fall evenly, since luck with
    24 coins is not what is tested.)"""
    coins, made = itertools.cycle([True, False]), Canaries.enter

    def with_coin(self, *args):
        made(self, *args)
        self._in[:] = next(coins)

    monkeypatch.setattr(Canaries, "enter", with_coin)
    honest = clipped_sum.clipping_weights
    monkeypatch.setattr(
        clipped_sum, "clipping_weights", lambda *args: torch.ones_like(honest(*args))
    )
    for check in ("self_check", "refuse_notice_of_length"):
        monkeypatch.setattr(f"hf_dp.run.engine_check.{check}", lambda *args, **kwargs: None)
    words = ["--runs", "24", "--max_steps", "1", "--per_example_max_grad_norm", "1e-4"]
    words += ["--target_epsilon", "0.2", "--target_delta", "1e-6", "--expected_batch_size", "41"]
    refused(
        ["audit", "leave-one-out", "--config", str(task), *words], "not as private as it claims"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--audit_canaries", "0"], "audit_canaries"),
        (["run", "--privacy_mode", "non_private"], "audit_canaries"),
        (["run", "--release", "training_loss"], "with release="),
        (["leave-one-out", "--runs", "3"], "`runs` to be a whole number >= 10"),
        (["something"], "exposure"),
    ],
    ids=str,
)
def test_what_cannot_be_audited_is_one_line(words, message, task, refused):
    refused(["audit", words[0], "--config", str(task), *words[1:]], message)
    assert not (task.parent / "out_audit").exists()


@pytest.mark.parametrize("command", ["run", "leave-one-out"])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["audit", command, "--help"])
    assert stop.value.code == 0 and f"hf-dp audit {command} --config" in capsys.readouterr().out
