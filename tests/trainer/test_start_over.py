"""``start_over=True``: the earlier run moves aside, whole and readable, and both runs count."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import tiny

from hf_dp.accounting import EARLIER
from hf_dp.errors import InvalidArgumentError, LedgerError
from hf_dp.run.checkpoint import numbered
from hf_dp.run.marks import read_run
from hf_dp.statement.record import read
from hf_dp.statement.verify import disagreements
from hf_dp.statement.weaknesses import EarlierRun


def run(folder: Path, **options):
    options = {"save_strategy": "steps", "save_steps": 2, "logging_strategy": "no", **options}
    return tiny.trainer(folder, accountant="rdp", **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    run(folder).train()
    return folder


@pytest.fixture
def first(finished, tmp_path) -> Path:
    """A copy of a finished run of 4 steps with checkpoints at 2 and 4."""
    return shutil.copytree(finished, tmp_path, dirs_exist_ok=True)


def aside(folder: Path) -> Path:
    (found,) = folder.glob("_earlier-run-*")
    return found


def test_the_earlier_run_moves_aside_whole_and_counts(first):
    before, names = read(first), {path.name for path in first.iterdir()} - {"_privacy.lock"}
    second = run(first, max_steps=2, start_over=True)
    assert {path.name for path in first.iterdir()} >= names  # nothing moves before train()
    second.train()
    assert {path.name for path in aside(first).iterdir()} == names
    assert aside(first).name == f"_earlier-run-{before.run_id[:8]}"
    assert read_run(aside(first)).ledger.to_list() == before.ledger.to_list()
    assert (second.ledger.steps(EARLIER), second.ledger.steps("training")) == (4, 2)
    assert [path.name for path in numbered(first)] == ["checkpoint-2"]
    assert disagreements(read_run(first)) == []
    claim = read(first).weaknesses.earlier[0]
    assert isinstance(claim, EarlierRun) and claim.run_id == before.run_id


def test_the_new_run_is_resumed_without_naming_the_earlier_one(first):
    run(first, start_over=True).train()
    again = run(first)
    again.train(resume_from_checkpoint=str(first / "checkpoint-2"))
    assert (again.ledger.steps(EARLIER), again.ledger.steps("training")) == (4, 6)


def test_starting_over_twice_counts_all_three(first):
    run(first, start_over=True).train()
    third = run(first, max_steps=1, start_over=True)
    third.train()
    assert (third.ledger.steps(EARLIER), third.ledger.steps("training")) == (8, 1)
    assert len(list(first.glob("_earlier-run-*"))) == 2
    assert len(read(first).weaknesses.earlier) == 2


def test_the_target_covers_both_runs(first):
    second = run(first, target_epsilon=4.0, start_over=True)
    second.train()
    assert second.ledger.steps(EARLIER) == 4 and 3.9 < second.epsilon().value <= 4.0


def test_in_an_empty_folder_there_is_nothing_to_start_over(tmp_path):
    trainer = run(tmp_path, start_over=True)
    trainer.train()
    assert trainer.ledger.steps() == 4 and not list(tmp_path.glob("_earlier*"))
    trainer.train()  # goes on with its own run
    assert trainer.ledger.steps() == 8 and not list(tmp_path.glob("_earlier*"))


def test_start_over_and_resume_contradict_each_other(first):
    with pytest.raises(InvalidArgumentError, match="`start_over`.*resume_from_checkpoint=True"):
        run(first, start_over=True).train(resume_from_checkpoint=True)
    assert not list(first.glob("_earlier*"))


def test_a_run_on_other_rows_is_left_where_it_is(first):
    with pytest.raises(InvalidArgumentError, match="not on 40.*another output_dir"):
        run(first, start_over=True, given={"train_dataset": tiny.dataset(30)})


def test_a_run_that_went_on_meanwhile_is_not_moved(first):
    second = run(first, start_over=True)
    run(first, max_steps=6).train(resume_from_checkpoint=True)
    with pytest.raises(LedgerError, match="gone on since"):
        second.train()
    assert read_run(first).ledger.steps() == 6


@pytest.mark.parametrize("moves", range(5))  # of five files and folders
def test_a_start_over_that_is_broken_off_is_recognized_and_finished(first, monkeypatch, moves):
    """Whatever was moved, the old releases count, and no new run begins without them."""
    rename, left = os.rename, [moves]

    def broken(old, new):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", broken)
        with pytest.raises(KeyboardInterrupt):
            run(first, start_over=True).train()
    in_place = (first / "privacy.json").exists()
    if in_place:
        with pytest.raises(LedgerError, match="start_over=True again"):
            run(first).train(resume_from_checkpoint=True)
        with pytest.raises(LedgerError, match="another run"):
            run(first).train()
    second = run(first, max_steps=1, start_over=in_place)
    second.train()
    assert (second.ledger.steps(EARLIER), second.ledger.steps("training")) == (4, 1)
    assert (aside(first) / "checkpoint-4").exists() and not (first / "checkpoint-4").exists()
