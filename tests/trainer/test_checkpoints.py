"""Checkpoints appear complete or not at all; a resumed run says what it lost."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import tiny
from transformers import TrainerCallback
from watch import watch

from hf_dp.errors import BudgetExceededError, LedgerError
from hf_dp.run import checkpoint
from hf_dp.run.checkpoint import SAVING, rotate, stage, tidy
from hf_dp.run.ledger_file import COPY
from hf_dp.run.witnesses import checkpoints, read_run
from hf_dp.trainer.arguments import DPTrainingArguments

pytestmark = pytest.mark.usefixtures("unchecked")


class CrashAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


TARGET = {"target_epsilon": 4.0, "accountant": "rdp"}


def saving(folder: Path, **options):
    options = {"save_strategy": "steps", "save_steps": 2, "logging_strategy": "no", **options}
    return tiny.trainer(folder, **options)


def crashed(folder: Path, step: int, **options) -> None:
    trainer = saving(folder, **options)
    trainer.add_callback(CrashAt(step))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()


def test_a_checkpoint_is_in_its_place_only_when_it_is_complete(tmp_path, monkeypatch):
    seen = watch(monkeypatch, checkpoint, "sync_tree", before=lambda path: checkpoints(tmp_path))
    saving(tmp_path).train()
    assert seen == [[], [tmp_path / "checkpoint-2"]]
    for path in checkpoints(tmp_path):
        assert {each.name for each in path.iterdir()} >= {
            *("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"),
            *("privacy.json", "trainer_state.json", COPY),
        }
    assert not (tmp_path / SAVING).exists()


def test_every_file_and_folder_is_synced_before_the_rename(tmp_path, monkeypatch):
    """The order that a power cut can rely on: files, their folder, rename, the parent."""

    def synced_path(descriptor):
        return "fsync", os.readlink(f"/proc/self/fd/{descriptor}")

    calls = watch(monkeypatch, os, "fsync", before=synced_path)
    watch(monkeypatch, os, "rename", before=lambda old, new: ("rename", str(new)), notes=calls)
    saving(tmp_path, max_steps=2).train()
    place = calls.index(("rename", str(tmp_path / "checkpoint-2")))
    synced = {path for kind, path in calls[:place] if kind == "fsync"}
    aside = tmp_path / SAVING / "checkpoint-2"
    files = {str(aside / path.name) for path in (tmp_path / "checkpoint-2").iterdir()}
    assert len(files) > 8 and files <= synced
    assert str(aside) in synced
    assert ("fsync", str(tmp_path)) in calls[place:]


def test_a_checkpoint_without_a_state_is_not_resumed_from(run):
    for name in ("optimizer.pt", "scheduler.pt"):
        (run / "checkpoint-4" / name).rename(run / name)
        for resume in (True, str(run / "checkpoint-4")):
            with pytest.raises(LedgerError, match="'checkpoint-4'.*optimizer and schedule"):
                saving(run).train(resume_from_checkpoint=resume)
        (run / name).rename(run / "checkpoint-4" / name)


def test_weights_alone_are_not_resumed_from(tmp_path):
    saving(tmp_path, save_only_model=True, max_steps=2).train()
    with pytest.raises(LedgerError, match="save_only_model"):
        saving(tmp_path).train(resume_from_checkpoint=True)


def test_a_folder_of_saved_weights_is_no_checkpoint(run, tmp_path):
    weights = tmp_path / "weights"
    made = saving(weights, save_strategy="no", max_steps=1)
    made.train()
    made.save_model()
    for folder, words in (
        (weights, "name this folder in `earlier_runs`"),
        (run, "checkpoint-4', '"),
    ):
        with pytest.raises(LedgerError, match=f"is not a checkpoint: .*weights.*{words}") as error:
            saving(tmp_path / "again").train(resume_from_checkpoint=str(folder))
        assert str(folder) in str(error.value) and "save_only_model" not in str(error.value)


def test_lost_steps_are_counted_and_told(tmp_path, warnings_of):
    said = warnings_of("trainer.checkpointing")
    crashed(tmp_path, 3, **TARGET)
    again = tiny.resumed(saving(tmp_path, **TARGET))
    assert again.state.global_step == 3 and again.ledger.steps() == 4  # it ends early
    assert again.epsilon().value <= 4.0
    (told,) = said
    assert "Continuing from checkpoint-2" in told and "1 releases after it" in told


def test_a_run_that_spent_its_target_makes_no_further_step(run, tmp_path):
    """A kill may come between the last save and the end; transformers makes one more step."""
    saving(tmp_path / "target", **TARGET).train()
    for folder, options in ((run, {}), (tmp_path / "target", TARGET)):
        again = tiny.resumed(saving(folder, **options))
        assert (again.state.global_step, again.ledger.steps()) == (4, 4)
    branch = saving(tmp_path / "target", **TARGET)
    with pytest.raises(BudgetExceededError, match="would exceed it"):
        branch.train(resume_from_checkpoint=str(tmp_path / "target" / "checkpoint-2"))
    assert read_run(tmp_path / "target").ledger.steps() == 4


def test_the_best_checkpoint_is_known_by_its_final_path_and_kept(tmp_path):
    options = {
        "save_steps": 1, "save_total_limit": 2, "eval_strategy": "steps", "eval_steps": 1,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
    }  # fmt: skip
    trainer = tiny.trained(saving(tmp_path, **options))
    best = trainer.state.best_model_checkpoint
    assert best == str(tmp_path / f"checkpoint-{trainer.state.best_global_step}")
    assert Path(best) in checkpoints(tmp_path) and len(checkpoints(tmp_path)) == 2
    for path in checkpoints(tmp_path):
        state = json.loads((path / "trainer_state.json").read_text())
        assert SAVING not in state["best_model_checkpoint"]


def test_rotation_keeps_the_newest_and_not_the_highest(tmp_path):
    for age, step in enumerate((6, 8, 2, 4)):
        path = tmp_path / f"checkpoint-{step}"
        path.mkdir()
        os.utime(path, (age, age))
    rotate(tmp_path, 2, str(tmp_path / "checkpoint-6"))
    assert {path.name for path in checkpoints(tmp_path)} == {"checkpoint-6", "checkpoint-4"}
    assert not (tmp_path / SAVING).exists()


def test_what_a_killed_save_left_is_removed_and_nothing_else(tmp_path):
    aside = stage(tmp_path)
    for name in ("checkpoint-7", "replaced-checkpoint-2", "mine"):
        (aside / name).mkdir()
        (aside / name / "file").touch()
    (aside / "notes.txt").touch()
    (tmp_path / "checkpoint-3").mkdir()
    tidy(tmp_path)
    assert sorted(path.name for path in aside.iterdir()) == ["mine", "notes.txt"]
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-2"]
    assert (tmp_path / "checkpoint-2" / "file").exists()  # it was being replaced: put back
    (aside / "replaced-checkpoint-2").mkdir()
    tidy(tmp_path)  # it has its successor now
    assert not (aside / "replaced-checkpoint-2").exists()


def killed_run(folder, at=7, **options):
    """A run with the defaults of arguments that is killed; return its checkpoints."""
    defaults = {field.name: field.default for field in dataclasses.fields(DPTrainingArguments)}
    names = ("save_strategy", "save_steps", "save_total_limit", "logging_steps")
    given = {name: defaults[name] for name in names} | options
    trainer = tiny.trainer(folder, max_steps=22, **given, given={"callbacks": [CrashAt(at)]})
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    return {path.name for path in folder.glob("checkpoint-*")}


def test_a_run_with_default_arguments_that_is_killed_leaves_checkpoints_and_epsilon(tmp_path):
    assert killed_run(tmp_path) == {"checkpoint-3", "checkpoint-6"}  # a tenth of 22, rounded up
    assert read_run(tmp_path / "checkpoint-6").ledger.steps() == 6
    assert read_run(tmp_path).ledger.steps() == 7
    assert killed_run(tmp_path / "500", at=6, save_steps=500) == set()
