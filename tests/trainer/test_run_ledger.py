"""A ledger cannot go back: what a mark knows is in it, or nobody trains on."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import tiny
import torch
from rewriting import rewrite
from transformers import AutoModelForSequenceClassification

from hf_dp.errors import LedgerError
from hf_dp.plans.privacy import PrivacyPlan
from hf_dp.run import mark as mark_module
from hf_dp.run.ledger import RunLedger, refuse_foreign_ledger
from hf_dp.run.mark import COPIED_MARK, RUN_MARK, read_mark, read_stamp
from hf_dp.run.rebuild import rebuild
from hf_dp.statement.record import FILE_NAME, read, to_record, write
from hf_dp.statement.weaknesses import Weaknesses

PLAN = PrivacyPlan.create(
    num_examples=40, expected_batch_size=8, clipping_norm=0.1, noise_multiplier=1.0, max_steps=60
)


def begun(folder: Path, steps: int = 3) -> RunLedger:
    run = RunLedger(folder, PLAN)
    run.start(60)
    for _ in range(steps):
        step(run)
    return run


def step(run: RunLedger) -> None:
    if run.budget._goal is None:  # opened, not started
        run.budget.start(1)
    run.append(PLAN.event(1), "training")


def save_checkpoint(run: RunLedger, weights: bool = True) -> Path:
    """What the trainer does: weights, then the record, then the mark in the weights."""
    folder = run.folder / f"checkpoint-{run.ledger.steps()}"
    folder.mkdir()
    if weights:
        safetensors.torch.save_file(
            {"a": torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"}
        )
    run.save(folder)
    run.mark_weights(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of 5 steps with a checkpoint at 3."""
    run = begun(tmp_path / "run")
    save_checkpoint(run)
    step(run)
    step(run)
    run.stop()
    return run.folder


def resumed(folder: Path, checkpoint: str = "checkpoint-3") -> RunLedger:
    run = RunLedger(folder, PLAN)
    run.resume(folder / checkpoint)
    return run


def go_on(folder: Path, checkpoint: str = "checkpoint-3") -> int:
    """Resume, make a step, and return how many are in the ledger."""
    run = resumed(folder, checkpoint)
    try:
        run.start(5)
        step(run)
    finally:
        run.stop()
    return read(folder).ledger.steps()


def test_a_run_goes_on_and_its_mark_with_it(folder):
    assert go_on(folder) == 6
    assert read_mark(folder / RUN_MARK).ledger.steps() == 6
    assert read_mark(folder / "checkpoint-3" / COPIED_MARK).ledger.steps() == 3
    assert read_stamp(folder / "checkpoint-3" / "model.safetensors").ledger.steps() == 3


# -- order ---


def durable_order(folder: Path, monkeypatch) -> list[str]:
    """Which files were on the disk, one after the other, when ``append`` returned, and that it
    returned."""
    run = begun(folder, 1)
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def seen_fsync(descriptor: int) -> None:
        calls.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    def seen_replace(old: str, new: str) -> None:
        calls.append(Path(new).name)
        replace(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", seen_fsync)
        patch.setattr(os, "replace", seen_replace)
        step(run)
    calls.append("returned")
    run.stop()
    return calls


ORDER = ["file", FILE_NAME, "folder", "file", RUN_MARK, "folder", "returned"]


def test_the_ledger_is_durable_then_the_mark_then_the_value_is_used(tmp_path, monkeypatch):
    assert durable_order(tmp_path, monkeypatch) == ORDER


def test_planted_mark_before_the_ledger_is_seen(tmp_path, monkeypatch):
    original = RunLedger.save

    def mark_first(self, folder, statement=None):
        self._write_mark(Path(folder))
        original(self, folder, statement)

    monkeypatch.setattr(RunLedger, "save", mark_first)
    assert durable_order(tmp_path, monkeypatch) != ORDER


def test_planted_mark_that_is_not_written_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(RunLedger, "_write_mark", lambda *_: None)
    assert durable_order(tmp_path, monkeypatch) != ORDER


def test_a_kill_between_ledger_and_mark_leaves_the_ledger_one_ahead(folder, monkeypatch):
    run = resumed(folder)
    run.start(5)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunLedger, "_write_mark", killed)
        with pytest.raises(KeyboardInterrupt):
            step(run)
    run.stop()
    assert (read(folder).ledger.steps(), read_mark(folder / RUN_MARK).ledger.steps()) == (6, 5)
    again = resumed(folder)
    again.open()
    assert read_mark(folder / RUN_MARK).ledger.steps() == 6  # already before a step
    step(again)
    again.stop()
    assert read(folder).ledger.steps() == 7


def test_a_step_whose_mark_cannot_be_written_is_not_used(folder, monkeypatch):
    run = resumed(folder)
    run.start(5)

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(mark_module, "replace_file", full)
    with pytest.raises(OSError, match="No space"):
        step(run)
    run.stop()
    assert read(folder).ledger.steps() == 6  # and counts


# -- what went back is refused ---


def older_copy(folder: Path) -> None:
    shutil.copy(folder / "checkpoint-3" / FILE_NAME, folder / FILE_NAME)


def test_an_older_copy_of_the_record_is_refused(folder):
    older_copy(folder)
    with pytest.raises(LedgerError) as caught:
        resumed(folder)
    text = str(caught.value)
    assert (
        f"lacks what {RUN_MARK} knows of the same run, 5 of training, which 3 of training here do "
        "not continue" in text
    )
    assert f"hf-dp account rebuild {folder}" in text
    assert read(folder).ledger.steps() == 3  # left as it is


def test_planted_marks_that_are_not_read_are_seen(folder, monkeypatch):
    older_copy(folder)
    for module in ("ledger", "resume"):
        monkeypatch.setattr(f"hf_dp.run.{module}.marks_of_run", lambda folder: [])
    with pytest.raises(LedgerError, match="the ledger of this run went back"):
        go_on(folder)  # the mark itself does not go back even then
    monkeypatch.setattr("hf_dp.run.ledger.write_mark", lambda *_: None)
    assert go_on(folder) == 4  # what test_an_older_copy_of_the_record_is_refused refuses


def test_a_checkpoint_copied_over_the_run_is_refused(folder):
    """With all its files, the copied mark among them, as whoever restores "from a checkpoint" does
    it."""
    shutil.copytree(folder / "checkpoint-3", folder, dirs_exist_ok=True)
    assert read(folder).ledger.steps() == 3
    with pytest.raises(LedgerError, match=f"lacks what {RUN_MARK} knows"):
        resumed(folder)


def test_planted_mark_of_one_name_everywhere_would_go_back(folder, monkeypatch):
    monkeypatch.setattr("hf_dp.run.ledger.COPIED_MARK", RUN_MARK)
    run = resumed(folder)
    run.start(5)
    step(run)
    save_checkpoint(run)
    step(run)
    run.stop()
    shutil.copytree(folder / "checkpoint-6", folder, dirs_exist_ok=True)
    assert go_on(folder, "checkpoint-6") == 7  # 8, where the copy has another name


def test_an_older_copy_that_appears_before_the_lock_is_refused(folder):
    run = resumed(folder)
    older_copy(folder)
    with pytest.raises(LedgerError, match="3 steps now, and recorded 5 when it was read"):
        run.start(5)
    assert run._lock is None


def test_a_deleted_mark_is_missed_when_weights_are_ahead(folder):
    run = resumed(folder)
    run.start(5)
    step(run)
    later = save_checkpoint(run)
    run.stop()
    for path in (folder / RUN_MARK, later / COPIED_MARK, later / FILE_NAME):
        path.unlink()
    older_copy(folder)
    with pytest.raises(
        LedgerError,
        match=r"lacks what checkpoint-6/model.safetensors knows of the same run, 6 of training",
    ):
        resumed(folder)


def test_a_deleted_mark_is_missed_when_copies_of_it_exist(folder):
    """A folder with the record and marks of copies, but not the run's own, is a copy of a
    checkpoint."""
    (folder / RUN_MARK).unlink()
    run = resumed(folder)
    with pytest.raises(
        LedgerError, match=f"but not the run's own {RUN_MARK}: it is a copy of a checkpoint"
    ):
        run.open()


def test_a_copied_checkpoint_is_no_second_output_folder(folder, tmp_path):
    """Both would go on from step 3, and neither ledger would count the other's steps."""
    shutil.copytree(folder / "checkpoint-3", tmp_path / "other")
    run = RunLedger(tmp_path / "other", PLAN)
    run.resume(tmp_path / "other")
    with pytest.raises(LedgerError, match="Continue in the run's own output_dir"):
        run.start(5)


def test_an_edited_mark_is_refused(folder):
    path = folder / RUN_MARK
    data = json.loads(path.read_text())
    data["ledger"][0]["noise_multiplier"] = 2.0
    path.write_text(json.dumps(data))
    with pytest.raises(LedgerError, match="lacks what"):
        resumed(folder)
    path.write_text("{}")
    with pytest.raises(LedgerError, match=f"{RUN_MARK} was edited or damaged"):
        resumed(folder)


def test_the_mark_of_another_run_is_refused(folder, tmp_path):
    other = begun(tmp_path / "other", 1)
    other.stop()
    shutil.copy(other.folder / RUN_MARK, folder / "checkpoint-3" / COPIED_MARK)
    with pytest.raises(
        LedgerError, match=f"of run {other.run_id}.*one folder is for one run. Move"
    ):
        resumed(folder)


@pytest.mark.parametrize("which", ["record", "mark", "weights"])
def test_each_file_of_a_checkpoint_is_a_witness(folder, which):
    run = resumed(folder)
    run.start(5)
    step(run)
    later = save_checkpoint(run)
    run.stop()
    keep = {"record": FILE_NAME, "mark": COPIED_MARK, "weights": "model.safetensors"}[which]
    for path in later.iterdir():
        if path.name != keep:
            path.unlink()
    (folder / RUN_MARK).unlink()
    older_copy(folder)
    with pytest.raises(LedgerError, match=f"lacks what checkpoint-6/{keep} knows"):
        resumed(folder)


@pytest.mark.parametrize("name", [RUN_MARK, COPIED_MARK])
def test_a_new_run_does_not_begin_beside_a_mark(folder, name, tmp_path):
    other = tmp_path / "left"
    other.mkdir()
    shutil.copy(folder / RUN_MARK, other / name)
    with pytest.raises(
        LedgerError,
        match=f"holds {name} of another run .5 of training., but not its privacy.json.*rebuild",
    ):
        RunLedger(other, PLAN).start(5)
    for run_id in (None, "another"):
        with pytest.raises(LedgerError, match="of another run"):
            refuse_foreign_ledger(other, run_id)
    refuse_foreign_ledger(other, read(folder).run_id)
    assert not (other / FILE_NAME).exists()


def test_resume_without_the_record_says_how_to_rebuild_it(folder):
    (folder / FILE_NAME).unlink()
    with pytest.raises(
        LedgerError, match=f"output_dir is missing or damaged.*hf-dp account rebuild {folder}"
    ):
        resumed(folder)


def test_weights_that_a_kill_cut_short_are_named(folder):
    (folder / "checkpoint-5").mkdir()
    (folder / "checkpoint-5" / "model.safetensors").write_bytes(b"\x10\x00")
    with pytest.raises(
        LedgerError,
        match="checkpoint-5/model.safetensors to be a safetensors file.*kill.*delete it",
    ):
        resumed(folder)


def test_a_damaged_copy_is_named(folder):
    (folder / "checkpoint-5").mkdir()
    (folder / "checkpoint-5" / FILE_NAME).write_text("{")
    with pytest.raises(
        LedgerError,
        match="checkpoint 'checkpoint-5' cannot be used.*not complete JSON.*move the checkpoint "
        "out",
    ):
        resumed(folder)


# -- runs of an earlier version ---


def test_a_run_without_any_mark_goes_on_and_gets_one(folder):
    for path in (*folder.rglob("_privacy_mark*.json"), *folder.rglob("*.safetensors")):
        path.unlink()
    run = resumed(folder)
    run.open()
    assert read_mark(folder / RUN_MARK).ledger.steps() == 5  # before any further step
    step(run)
    run.stop()
    assert read_mark(folder / RUN_MARK).ledger.steps() == 6


def test_a_run_without_marks_has_its_checkpoints_for_witnesses(folder):
    run = resumed(folder)
    run.start(5)
    step(run)
    save_checkpoint(run)
    run.stop()
    for path in (*folder.rglob("_privacy_mark*.json"), *folder.rglob("*.safetensors")):
        path.unlink()
    older_copy(folder)
    with pytest.raises(LedgerError, match=f"lacks what checkpoint-6/{FILE_NAME} knows"):
        resumed(folder)


# -- what weakens a run is not forgotten either ---


def test_what_weakens_a_run_comes_back_from_its_marks(folder):
    """Noted at the checkpoint, or before an older copy of the record was put in place."""
    run = resumed(folder)
    run.released, run.model_selection, run.rows_are_chunks, run.evaluation_compared = (
        ("loss",),
        True,
        True,
        False,
    )
    run.start(5)
    step(run)
    run.stop()
    unweakened = {"released": [], "model_selection": False, "rows_are_chunks": False}
    rewrite(
        folder / FILE_NAME,
        lambda data: data["plan"].update(unweakened, evaluation_compared=True),
    )
    again = resumed(folder)
    again.open()
    expected = Weaknesses(
        released=("loss",), model_selection=True, rows_are_chunks=True, evaluation_compared=False
    )
    assert again.weaknesses == expected
    step(again)
    again.stop()
    assert read(folder).weaknesses == expected


def test_planted_weaknesses_that_are_forgotten_are_seen(folder, monkeypatch):
    run = resumed(folder)
    run.released = ("loss",)
    run.start(5)
    step(run)
    monkeypatch.setattr(run, "released", ())
    with pytest.raises(LedgerError, match="What was true of a run once is true for good"):
        step(run)
    run.stop()


def test_a_record_that_forgets_what_weakens_a_run_is_not_written(folder):
    before = read(folder)
    write(
        folder,
        to_record(
            PLAN, before.ledger, run_id=before.run_id, weaknesses=Weaknesses(insecure_seed=True)
        ),
    )
    with pytest.raises(LedgerError, match="true for good"):
        write(folder, to_record(PLAN, before.ledger, run_id=before.run_id))


# -- weights ---


def test_weights_of_a_run_are_not_marked_by_another(folder, tmp_path):
    other = begun(tmp_path / "other", 1)
    content = (folder / "checkpoint-3" / "model.safetensors").read_bytes()
    with pytest.raises(LedgerError, match="carries the mark of run"):
        other.mark_weights(folder / "checkpoint-3")
    other.stop()
    assert (folder / "checkpoint-3" / "model.safetensors").read_bytes() == content


def test_marks_do_not_change_a_model(tmp_path):
    """Loaded by transformers, in shards, with other files left as they are."""
    model = tiny.model()
    folder = tmp_path / "saved"
    model.save_pretrained(folder, max_shard_size="10KB")
    masks = {"selection_masks.safetensors", "_released_rows.safetensors"}
    for name in masks:
        safetensors.torch.save_file({"a": torch.ones(3)}, folder / name)
    run = begun(tmp_path / "run")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    run.mark_weights(folder)
    run.stop()
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert all(read_stamp(path).extends(run.mark) for path in shards)
    changed = {path.name for path in folder.iterdir() if before.get(path.name) != path.read_bytes()}
    assert changed == {*(path.name for path in shards), COPIED_MARK}
    loaded = AutoModelForSequenceClassification.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


# -- whole runs ---


def trained(folder: Path, **options):
    """4 steps with checkpoints at 2 and 4, whose weights carry marks."""
    trainer = tiny.trainer(folder, save_strategy="steps", save_steps=2, **options)
    trainer.train()
    for checkpoint in folder.glob("checkpoint-*"):
        assert (checkpoint / COPIED_MARK).exists()
    return trainer


def test_a_whole_run_with_an_older_record_is_refused_until_it_is_rebuilt(tmp_path):
    first = trained(tmp_path)
    shutil.copy(tmp_path / "checkpoint-2" / FILE_NAME, tmp_path / FILE_NAME)
    again = tiny.trainer(tmp_path, save_strategy="steps", save_steps=2)
    with pytest.raises(
        LedgerError,
        match="4 of training, which 2 of training here do not continue.*account rebuild",
    ):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(again.ledger) == 0
    assert rebuild(tmp_path).added.steps() == 2
    assert read(tmp_path).ledger == first.ledger
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.ledger.steps() == 6  # the branch's two steps count, too


def test_planted_whole_run_with_an_older_record_trains_on(tmp_path, monkeypatch):
    trained(tmp_path)
    shutil.copy(tmp_path / "checkpoint-2" / FILE_NAME, tmp_path / FILE_NAME)
    for module in ("ledger", "resume"):
        monkeypatch.setattr(f"hf_dp.run.{module}.marks_of_run", lambda folder: [])
    monkeypatch.setattr("hf_dp.run.ledger.write_mark", lambda *_: None)
    monkeypatch.setattr(RunLedger, "_write_mark", lambda *_: None)
    again = tiny.trainer(tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.ledger.steps() == 4  # of six that ran: what the run above is refused for


def test_saved_weights_carry_the_mark_of_the_run(tmp_path):
    trainer = trained(tmp_path)
    trainer.save_model(str(tmp_path / "final"))
    trainer.run.book.mark_weights(tmp_path / "final")
    assert read_stamp(tmp_path / "final" / "model.safetensors").ledger == trainer.ledger
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "final")
