"""What earlier runs released begins a ledger whole or not at all, wherever a kill comes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import tiny

from hf_dp import DpSgdPlan, PrivacyPlan, PrivateRun
from hf_dp.errors import LedgerError
from hf_dp.run.folder import moved_aside
from hf_dp.statement import durable
from hf_dp.statement.record import read


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    for noise in (2.0, 0.5):
        tiny.trainer(
            folder, noise_multiplier=noise, max_steps=2, accountant="rdp", start_over=noise < 1
        ).train()
    return folder


@pytest.fixture
def two_runs(finished, tmp_path) -> Path:
    """A copy of B, which started over from A: its ledger begins with A's releases."""
    return shutil.copytree(finished, tmp_path, dirs_exist_ok=True)


@pytest.mark.parametrize(
    "after",
    [pytest.param(n, marks=[] if n in (1, 3, 5, 8) else pytest.mark.slow) for n in range(1, 9)],
)
def test_a_start_over_that_is_killed_counts_all_the_same(after, two_runs, monkeypatch):
    writes, replace = [], os.replace

    def die_after(*args):
        replace(*args)
        writes.append(args)
        if len(writes) == after:
            raise Killed

    starts = {"max_steps": 1, "accountant": "rdp", "start_over": True}
    with monkeypatch.context() as patch:
        patch.setattr(durable.os, "replace", die_after)
        try:
            tiny.trainer(two_runs, **starts).train()
        except Killed:
            pass
    again = tiny.trainer(two_runs, **starts)
    again.train()
    steps = read(two_runs).ledger.to_list()
    noises = [(entry["noise_multiplier"], entry["steps"]) for entry in steps]
    assert (2.0, 2) in noises and (0.5, 2) in noises, noises
    assert again.epsilon("rdp").value > 5  # what B spent alone


def test_a_run_moved_aside_cannot_be_forgotten_by_a_loop_of_ones_own(two_runs):
    (two_runs / "privacy.json").unlink()
    for path in two_runs.glob("_privacy*"):
        path.unlink()
    for path in two_runs.glob("README.md"):
        path.unlink()
    assert moved_aside(two_runs)
    plan = PrivacyPlan.solve(
        num_examples=40,
        expected_batch_size=8,
        mechanism=DpSgdPlan(clipping_norm=0.1, noise_multiplier=1.0),
        max_steps=1,
    )
    private = PrivateRun(
        tiny.model(), plan, two_runs, train_dataset=tiny.dataset(), data_collator=list
    )
    with pytest.raises(LedgerError, match="an earlier run on the same rows that this run does not"):
        private.open()
