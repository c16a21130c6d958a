"""A ledger that went back is put right from the marks; where nothing shows how far it went, that is
said."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from hf_dp.accounting import Ledger
from hf_dp.errors import LedgerError
from hf_dp.plans import DpSgdPlan, PrivacyPlan
from hf_dp.run.lock import lock_run
from hf_dp.run.mark import COPIED_MARK, RUN_MARK, Mark, read_mark, stamp, write_mark
from hf_dp.run.rebuild import rebuild
from hf_dp.statement.record import FILE_NAME, read, to_record, write
from hf_dp.statement.statement import PrivacyStatement, RunFacts
from hf_dp.statement.weaknesses import Weaknesses

PLAN = PrivacyPlan(1000, 100.0, 10, 1e-4, DpSgdPlan(1.0, 2.0))
FACTS = RunFacts("all", "float32", "noise", "sampling")


def ledger_of(steps: int, *purposes: str) -> Ledger:
    """``steps`` of training, and after them one release for each purpose."""
    ledger = Ledger()
    ledger.append(PLAN.event(steps), "training")
    for purpose in purposes:
        ledger.append(PLAN.event(1), purpose)
    return ledger


def put(
    folder: Path,
    ledger: Ledger,
    name: str,
    run_id: str = "run-a",
    statement: Any = None,
    **weak: Any,
) -> None:
    weaknesses = Weaknesses(**weak)
    write(
        folder, to_record(PLAN, ledger, run_id=run_id, weaknesses=weaknesses, statement=statement)
    )
    write_mark(folder / name, Mark(run_id, ledger, weaknesses))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Five steps, of which a checkpoint has three."""
    put(tmp_path / "checkpoint-3", ledger_of(3), COPIED_MARK)
    put(tmp_path, ledger_of(5), RUN_MARK)
    return tmp_path


def rows(ledger: Ledger) -> list[tuple[str, int]]:
    return [(entry.purpose, entry.event.steps) for entry in ledger.entries]


def older_copy(run: Path) -> None:
    shutil.copy(run / "checkpoint-3" / FILE_NAME, run / FILE_NAME)


def test_steps_that_an_older_copy_lacks_come_back(run: Path) -> None:
    older_copy(run)
    done = rebuild(run)
    assert (rows(done.added), done.changed, done.set_aside, done.had_mark) == (
        [("training", 2)],
        True,
        None,
        True,
    )
    record = read(run)
    assert (record.ledger, record.run_id, record.plan) == (ledger_of(5), "run-a", PLAN)
    assert (record.status, record.statement) == ("running", None)


def test_entries_of_other_purposes_come_back(run: Path) -> None:
    ledger = ledger_of(5, "selection", "training", "selection")
    write_mark(run / RUN_MARK, Mark("run-a", ledger, Weaknesses()))
    done = rebuild(run)
    assert rows(done.added) == [("selection", 1), ("training", 1), ("selection", 1)]
    assert read(run).ledger == ledger


def test_a_record_that_lacks_nothing_keeps_its_statement(run: Path) -> None:
    statement = PrivacyStatement.from_ledger(PLAN, ledger_of(5), FACTS)
    put(run, ledger_of(5), RUN_MARK, statement=statement)
    before = (run / FILE_NAME).read_bytes()
    done = rebuild(run)
    assert (len(done.added), done.changed) == (0, False)
    assert (run / FILE_NAME).read_bytes() == before


def test_a_record_one_step_ahead_of_its_mark_keeps_it_and_the_mark_follows(run: Path) -> None:
    write(run, to_record(PLAN, ledger_of(6), run_id="run-a"))
    assert not rebuild(run).changed
    assert (read(run).ledger.steps(), read_mark(run / RUN_MARK).ledger.steps()) == (6, 6)


@pytest.mark.parametrize("damage", [None, "", "{", "[]", '{"schema_version": 2}'])
def test_a_record_that_is_lost_comes_back_with_the_plan_of_the_newest_copy(
    run: Path, damage: str | None
) -> None:
    """The damaged file is kept under another name."""
    put(
        run / "checkpoint-10", ledger_of(4), COPIED_MARK
    )  # newer than 3, which sorts behind it as text
    (run / FILE_NAME).unlink()
    if damage is not None:
        (run / FILE_NAME).write_text(damage)
        (run / f"_damaged-1-{FILE_NAME}").write_text("kept")
    done = rebuild(run)
    assert read(run).ledger == ledger_of(5)
    assert rows(done.added) == [("training", 5)]
    if damage is None:
        assert done.set_aside is None
    else:
        assert done.set_aside is not None
        assert (done.set_aside.name, done.set_aside.read_text()) == (
            f"_damaged-2-{FILE_NAME}",
            damage,
        )
        assert (run / f"_damaged-1-{FILE_NAME}").read_text() == "kept"


def test_what_weakens_the_run_is_that_of_all_files(run: Path) -> None:
    put(run / "checkpoint-4", ledger_of(4), COPIED_MARK, released=("loss",), rows_are_chunks=True)
    put(run, ledger_of(5), RUN_MARK, model_selection=True)
    done = rebuild(run)
    assert done.changed and not len(done.added)
    expected = Weaknesses(released=("loss",), rows_are_chunks=True, model_selection=True)
    assert read(run).weaknesses == expected == read_mark(run / RUN_MARK).weaknesses


def test_weights_are_witnesses(run: Path) -> None:
    path = run / "checkpoint-3" / "adapter_model.safetensors"
    safetensors.torch.save_file({"a": torch.ones(3)}, path)
    stamp(path, Mark("run-a", ledger_of(9), Weaknesses()))
    assert rows(rebuild(run).added) == [("training", 4)]


@pytest.mark.parametrize(
    "other", [ledger_of(3, "selection"), ledger_of(2, "selection", "training")]
)
def test_two_ledgers_of_which_neither_continues_the_other_are_refused(
    run: Path, other: Ledger
) -> None:
    put(run / "checkpoint-4", other, COPIED_MARK)
    before = (run / FILE_NAME).read_bytes()
    with pytest.raises(LedgerError, match=r"neither ledger continues the other") as caught:
        rebuild(run)
    assert "5 of training" in str(caught.value) and "1 of selection" in str(caught.value)
    assert (run / FILE_NAME).read_bytes() == before


def test_planted_rebuild_from_the_longest_of_two_would_lose_steps(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(run / "checkpoint-4", ledger_of(3, "selection"), COPIED_MARK)
    monkeypatch.setattr(Ledger, "extends", lambda self, other: True)
    rebuild(run)
    assert read(run).ledger.steps("selection") == 0  # it ran: what the refusal above is for


def test_files_of_two_runs_are_refused(run: Path) -> None:
    put(run / "checkpoint-4", ledger_of(4), COPIED_MARK, run_id="run-b")
    with pytest.raises(LedgerError, match="of run run-a.*of run run-b.*one folder is for one run"):
        rebuild(run)


def test_without_the_runs_own_mark_an_older_record_is_refused(run: Path) -> None:
    """The checkpoint knows more than the record, so the record went back, and nothing shows by how
    much."""
    put(run / "checkpoint-7", ledger_of(7), COPIED_MARK)
    (run / RUN_MARK).unlink()
    before = (run / FILE_NAME).read_bytes()
    with pytest.raises(
        LedgerError, match=f"no {RUN_MARK}.*7 of training.*nothing shows how far the run went"
    ):
        rebuild(run)
    assert (run / FILE_NAME).read_bytes() == before
    (run / FILE_NAME).write_text("{")
    with pytest.raises(LedgerError, match="nothing shows how far the run went"):
        rebuild(run)
    assert (run / FILE_NAME).read_text() == "{"


def test_without_the_runs_own_mark_a_record_that_knows_all_gets_one(run: Path) -> None:
    (run / RUN_MARK).unlink()
    done = rebuild(run)
    assert (done.changed, done.had_mark) == (False, False)
    assert read_mark(run / RUN_MARK).ledger == ledger_of(5)


def test_without_any_plan_it_is_refused(run: Path) -> None:
    (run / FILE_NAME).unlink()
    (run / "checkpoint-3" / FILE_NAME).unlink()
    with pytest.raises(LedgerError, match="no checkpoint has a copy with the plan"):
        rebuild(run)
    assert not (run / FILE_NAME).exists()


def test_a_damaged_mark_is_refused(run: Path) -> None:
    (run / RUN_MARK).write_text("{")
    with pytest.raises(LedgerError, match=f"{RUN_MARK} was edited or damaged"):
        rebuild(run)


def test_a_newer_record_is_not_replaced(run: Path) -> None:
    (run / FILE_NAME).write_text('{"schema_version": 99}')
    with pytest.raises(LedgerError, match="Upgrade hf_dp"):
        rebuild(run)
    assert (run / FILE_NAME).read_text() == '{"schema_version": 99}'


@pytest.mark.parametrize(
    ("name", "message"), [("nowhere", "it has neither"), ("checkpoint-3", "is a checkpoint")]
)
def test_another_folder_is_refused(run: Path, name: str, message: str) -> None:
    with pytest.raises(LedgerError, match=message):
        rebuild(run / name)
    assert not (run / name / RUN_MARK).exists()


def test_it_does_not_race_a_training_process(run: Path) -> None:
    older_copy(run)
    lock = lock_run(run)
    try:
        with pytest.raises(LedgerError, match="Another process is training"):
            rebuild(run)
    finally:
        lock.release()
    assert read(run).ledger.steps() == 3
    rebuild(run)
    lock_run(run).release()  # free again
