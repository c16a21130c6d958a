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


def test_leave_one_out_reports_what_its_runs_tell(task):
    words = ["--runs", "10", "--max_steps", "1"]
    assert "in each of 10 runs" in task.run("audit leave-one-out", *words)
    folder = task.folder / "out_leave_one_out"
    report = json.loads((folder / audit.LEFT_OUT).read_text())
    assert (report["runs"], report["canaries"], report["scores"]) == (10, 10, "directions")
    assert 0 <= report["correct"] <= report["guesses"] <= 10
    assert read(folder / "run_9").plan.num_examples == 41
    task.refused("is not empty", "audit leave-one-out", *words)


def test_planted_missing_clipping_is_an_error_of_leave_one_out(task, monkeypatch):
    """Each row's gradient enters with its whole length, thousands of times C. (All rows are in
    each step, and few, so that the others differ little between runs; and coins fall evenly, since
    luck with 20 coins is not what is tested.)"""
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
    words = "--runs 20 --max_steps 1 --per_example_max_grad_norm 1e-4 --target_epsilon 0.2"
    words += " --target_delta 1e-6 --expected_batch_size 5 --max_train_rows 4"
    task.refused("not as private as it claims", "audit leave-one-out", *words.split())


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
def test_what_cannot_be_audited_is_one_line(words, message, task):
    task.refused(message, f"audit {words[0]}", *words[1:])
    assert not (task.folder / "out_audit").exists()


@pytest.mark.parametrize("command", ["run", "leave-one-out"])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["audit", command, "--help"])
    assert stop.value.code == 0 and f"hf-dp audit {command} --config" in capsys.readouterr().out
