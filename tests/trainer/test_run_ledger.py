"""A ledger cannot go back: what anything else knows of it is in it, or nobody trains on."""

import json
import os
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import tiny
import torch
from transformers import AutoModelForSequenceClassification
from watch import watch

from hf_dp.accounting import Ledger, PoissonSampledGaussian
from hf_dp.errors import LedgerError
from hf_dp.plans import DpSgdPlan, PrivacyPlan
from hf_dp.plans.dp_sgd import Search
from hf_dp.run import ledger_file
from hf_dp.run.budget import Budget
from hf_dp.run.ledger import RunLedger
from hf_dp.run.ledger_file import COPY, HEAD, LEDGER, read_copy, read_head, read_own
from hf_dp.run.witnesses import HEAD_KEY, add_metadata, head_in, read_run, refuse_foreign
from hf_dp.statement.evidence import FILE_NAME, read
from hf_dp.statement.facts import Flags, RunFacts, Weaknesses
from hf_dp.statement.statement import PrivacyStatement

pytestmark = pytest.mark.usefixtures("unchecked")

PLAN = PrivacyPlan(40, 8.0, 60, 1 / 80, DpSgdPlan(0.1, 1.0), accountant="rdp")


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
    """What the trainer does: weights, the head in them and the copy, then what is stated."""
    folder = run.folder / f"checkpoint-{run.ledger.steps()}"
    folder.mkdir()
    if weights:
        safetensors.torch.save_file(
            {"a": torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"}
        )
    run.go_with(folder)
    facts = RunFacts(**vars(run.weaknesses), trained="a", precision="b", noise_generator="c",
                     sampling_generator="d")  # fmt: skip
    run.save(folder, PrivacyStatement.from_ledger(PLAN, run.ledger, facts))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    run = begun(tmp_path_factory.mktemp("made") / "run")
    save_checkpoint(run)
    step(run)
    step(run)
    run.stop()
    return run.folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A run of 5 steps with a checkpoint at 3."""
    return shutil.copytree(made, tmp_path / "run")


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
    return steps_of(folder)


def go_on_to_a_checkpoint(folder: Path, flags: Flags | None = None) -> Path:
    """Resume with what weakens the run, make a step, and save a checkpoint."""
    run = resumed(folder)
    if flags is not None:
        run.weaken(flags)
    run.start(5)
    step(run)
    try:
        return save_checkpoint(run)
    finally:
        run.stop()


def steps_of(folder: Path) -> int:
    return read_run(folder).ledger.steps()


def test_a_run_goes_on_and_its_head_with_it(folder):
    assert go_on(folder) == 6
    head = read_head(folder)
    assert head is not None and head.lines == 6 and read_own(folder).head == head
    copy = read_copy(folder / "checkpoint-3")
    assert len(copy.digests) == 3 and read_own(folder).contains(copy.head)
    assert head_in(folder / "checkpoint-3" / "model.safetensors") == copy.head
    assert read(folder / "checkpoint-3").head == copy.head


# -- order ---


def durable_order(folder: Path, monkeypatch) -> list[str]:
    """What was on the disk when ``append`` returned, one after the other."""
    run = begun(folder, 1)

    def synced(descriptor: int) -> str:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        return "folder" if path.is_dir() else path.name.partition(".json.")[0]

    with monkeypatch.context() as patch:
        calls = watch(patch, os, "fsync", before=synced)
        watch(
            patch, os, "replace", before=lambda old, new: f"in place: {Path(new).name}", notes=calls
        )
        step(run)
        calls.append("returned")
    run.stop()
    return calls


ORDER = [LEDGER, "__ledger_head", f"in place: {HEAD}", "folder", "returned"]


def test_the_line_is_durable_then_the_head_then_the_value_is_used(tmp_path, monkeypatch):
    assert durable_order(tmp_path, monkeypatch) == ORDER


def test_planted_head_that_is_not_written_and_line_that_is_not_synced_are_seen(
    tmp_path, monkeypatch
):
    def unsynced(path, size, line):
        with open(path, "ab") as stream:
            stream.write(line)

    with monkeypatch.context() as patch:
        patch.setattr(ledger_file, "write_head", lambda folder, head: None)
        assert durable_order(tmp_path / "head", monkeypatch) != ORDER
    monkeypatch.setattr(ledger_file, "write_line", unsynced)
    with pytest.raises((AssertionError, LedgerError)):
        assert durable_order(tmp_path / "line", monkeypatch) == ORDER


def killed_before_the_head(run: RunLedger) -> None:
    """Make a step that ends between its line and its head."""
    run.start(5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger_file, "write_head", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            step(run)
    run.stop()


def test_a_kill_between_line_and_head_leaves_the_ledger_one_ahead(folder):
    killed_before_the_head(resumed(folder))
    assert (steps_of(folder), read_head(folder).lines) == (6, 5)
    again = resumed(folder)
    again.open()
    assert read_head(folder).lines == 6  # already before a step
    step(again)
    again.stop()
    assert steps_of(folder) == 7


def test_a_step_whose_head_cannot_be_written_is_not_used(folder, monkeypatch):
    run = resumed(folder)
    run.start(5)
    full = mock.Mock(side_effect=OSError("No space left on device"))
    monkeypatch.setattr(ledger_file, "write_head", full)
    with pytest.raises(OSError, match="No space"):
        step(run)
    run.stop()
    assert steps_of(folder) == run.ledger.steps() == 6  # and counts


# -- a last line that is torn ---


TORN = {  # what a power cut leaves of a line
    "one byte": lambda line: line[:1],
    "a part": lambda line: line[:40],
    "all but its end": lambda line: line[:-1],
    "a block of zeros": lambda line: bytes(200) + b"\n",
}


@pytest.mark.parametrize("left", TORN)
def test_a_torn_last_line_that_no_head_knows_is_cut(folder, left):
    whole = (folder / LEDGER).read_bytes()
    line = whole.splitlines(keepends=True)[-1]
    (folder / LEDGER).write_bytes(whole + TORN[left](line))
    assert steps_of(folder) == 5
    assert go_on(folder) == 6
    assert (folder / LEDGER).read_bytes().startswith(whole)
    assert read_own(folder).ledger.steps() == 6


def test_a_first_line_that_is_torn_is_no_run(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / LEDGER).write_bytes((folder / LEDGER).read_bytes()[:100])
    run = begun(other, 2)
    run.stop()
    assert steps_of(other) == 2


def test_a_kill_before_the_first_head_leaves_a_run_of_one_release(tmp_path):
    killed_before_the_head(RunLedger(tmp_path, PLAN))
    assert steps_of(tmp_path) == 1
    with pytest.raises(LedgerError, match="of another run"):
        begun(tmp_path)


# -- what went back is refused ---


def older_copy(folder: Path) -> None:
    shutil.copy(folder / "checkpoint-3" / COPY, folder / LEDGER)


def in_ledger(change):
    def changed(folder: Path) -> None:
        (folder / LEDGER).write_bytes(change((folder / LEDGER).read_bytes()))

    return changed


def edited(change):
    """Change the lines, each as what its JSON holds."""

    def changed(whole: bytes) -> bytes:
        lines = [json.loads(line) for line in whole.splitlines()]
        change(lines)
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        return text.encode()

    return in_ledger(changed)


EDITS = {
    "another multiplier": lambda lines: lines[1]["entries"][0].update(noise_multiplier=2.0),
    "no entries": lambda lines: lines[1].pop("entries"),
    "a line less": lambda lines: lines.pop(1),
    "two lines swapped": lambda lines: lines.insert(1, lines.pop(2)),
    "another plan": lambda lines: lines[0]["plan"].update(delta=0.5),
    "no run": lambda lines: lines[0].pop("run_id"),
    "a key more": lambda lines: lines[4].update(more=1),
    "another last line": lambda lines: lines[4]["entries"][0].update(noise_multiplier=2.0),
}


def cut_weights(folder: Path) -> None:
    (folder / "checkpoint-5").mkdir()
    (folder / "checkpoint-5" / "model.safetensors").write_bytes(b"\x10\x00")


def head_of_weights(text: str):
    weights = Path("checkpoint-3", "model.safetensors")
    return lambda folder: add_metadata(folder / weights, {HEAD_KEY: text})


def holding(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


NO_HEADS = [b"", b"{", b"[]", b"\xff", b'{"lines": NaN}', b"[" * 100_000, b'{"run_id": ""}']
HALF_HEADS = ["", "{", '{"run_id": "a"}', '{"run_id": "a", "lines": true}']
COPIED = f"checkpoint-3/{COPY}"
DAMAGE = {
    "older ledger": (older_copy, f"went back: .*{HEAD} knows line 5.*3 lines.*No copy"),
    "no head": (lambda folder: (folder / HEAD).unlink(), f"{HEAD} was edited or damaged .it is missing"),
    "no ledger": (lambda folder: (folder / LEDGER).unlink(), f"{HEAD} knows line 5 of it, and it is missing"),
    "last line not whole": (in_ledger(lambda whole: whole[:-1]), f"{HEAD} knows line 5"),
    "damaged last line": (in_ledger(lambda whole: whole[:-9] + b"damaged\n"), f"{LEDGER} was edited or damaged .line 5"),
    "weights that a kill cut short": (cut_weights, "checkpoint-5/model.safetensors to be a safetensors file.*kill.*delete it"),
    "no copy": (lambda folder: (folder / COPIED).unlink(), COPY),
    **{edit: (edited(EDITS[edit]), "edited or damaged|went back") for edit in EDITS},
    **{f"head {left[:20]}": (holding(HEAD, left), f"{HEAD} was edited or damaged") for left in NO_HEADS},
    **{f"copy {left[:20]}": (holding(COPIED, left + b"\n"), f"{COPIED} was edited or damaged") for left in NO_HEADS},
    **{f"weights with {text}": (head_of_weights(text), HEAD_KEY) for text in HALF_HEADS},
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_what_went_back_or_is_damaged_is_refused(folder, name):
    change, message = DAMAGE[name]
    change(folder)
    with pytest.raises(LedgerError, match=message):
        resumed(folder)


def test_planted_witnesses_that_are_not_heard_are_seen(folder, monkeypatch):
    older_copy(folder)
    with pytest.raises(LedgerError, match="went back"):
        read_run(folder)
    assert len(read_own(folder).digests) == 3  # left as it is
    monkeypatch.setattr("hf_dp.run.witnesses.heads_in", lambda folder: iter(()))
    assert go_on(folder) == 4


def test_a_checkpoint_copied_over_the_run_takes_nothing_back(folder):
    """With all its files, as one restores "from a checkpoint": a copy has another name."""
    shutil.copytree(folder / "checkpoint-3", folder, dirs_exist_ok=True)
    assert steps_of(folder) == 5 and go_on(folder) == 6


def test_planted_copy_of_the_same_name_would_go_back(folder, monkeypatch):
    shutil.copytree(folder / "checkpoint-3", folder, dirs_exist_ok=True)
    shutil.copy(folder / COPY, folder / LEDGER)
    (folder / HEAD).write_text(json.dumps(read_copy(folder).head.to_dict()))
    assert steps_of(folder) == 3


def test_two_processes_cannot_share_a_run(folder):
    first, second = resumed(folder), resumed(folder)
    first.start(5)
    with pytest.raises(LedgerError, match="Another process is training"):
        second.start(5)
    first.stop()
    second.start(5)


def test_another_process_that_went_on_before_the_lock_is_noticed(folder):
    run = resumed(folder)
    assert go_on(folder) == 6
    with pytest.raises(LedgerError, match="6 lines now, but had 5 when it was read"):
        run.start(5)
    assert run._lock is None


def test_a_run_that_ended_takes_nothing_back_of_what_another_process_did(folder):
    """Right before: what weakens the claim was written at its own end, over the other's lines."""
    ended = resumed(folder)
    ended.start(5)
    ended.stop()
    other = resumed(folder)
    other.start(5)
    step(other)
    before = (folder / LEDGER).read_bytes()
    ended.weaken(Flags(evaluation_compared=False))
    writes = (ended.note, lambda: ended.go_with(folder / "checkpoint-3"))
    for write in writes:
        with pytest.raises(LedgerError, match="Another process is training"):
            write()
    step(other)  # whose lock it is
    other.stop()
    for write in writes:
        with pytest.raises(LedgerError, match="7 lines now, but had 5 when it was read"):
            write()
    with pytest.raises(LedgerError, match="has not been opened"):
        ended._write()
    assert (folder / LEDGER).read_bytes().startswith(before) and steps_of(folder) == 7
    assert ended._lock is None
    (folder / LEDGER).unlink()
    with pytest.raises(LedgerError, match="is missing"):
        ended.note()


def test_planted_lock_without_a_comparison_is_seen(folder, monkeypatch):
    ended = resumed(folder)
    assert go_on(folder) == 6
    ended.weaken(Flags(evaluation_compared=False))
    monkeypatch.setattr(ended, "_open_folder", ended.take)
    ended.note()
    assert read_own(folder).ledger.steps() == 5


@pytest.mark.parametrize("which", [FILE_NAME, COPY, "model.safetensors"])
def test_each_file_of_a_checkpoint_is_a_witness(folder, which):
    for path in go_on_to_a_checkpoint(folder).iterdir():
        if path.name != which:
            path.unlink()
    older_copy(folder)
    (folder / HEAD).write_text(json.dumps(read_own(folder).head.to_dict()))
    with pytest.raises(LedgerError, match=f"checkpoint-6/{which} knows line 6"):
        resumed(folder)


def test_two_copies_that_went_on_apart_are_not_taken_for_one_run(folder, tmp_path):
    """Both have as many lines, and other digests."""
    other = shutil.copytree(folder, tmp_path / "other")
    later = go_on_to_a_checkpoint(other, Flags(released=("training_loss",)))
    assert go_on(folder) == 6
    with pytest.raises(LedgerError, match="went back"):
        resumed(folder, str(later))


def test_a_copied_checkpoint_is_no_second_output_folder(folder, tmp_path):
    """Both would go on from step 3, and neither ledger would count the other's steps."""
    shutil.copytree(folder / "checkpoint-3", tmp_path / "other")
    run = RunLedger(tmp_path / "other", PLAN)
    with pytest.raises(LedgerError, match="Continue in the run's own output_dir"):
        run.resume(tmp_path / "other")


def test_the_head_of_another_run_is_refused(folder, tmp_path):
    other = begun(tmp_path / "other", 1)
    other.stop()
    shutil.copy(other.folder / LEDGER, folder / "checkpoint-3" / COPY)
    with pytest.raises(LedgerError, match=f"to run {other.run_id}.*one folder is for one run"):
        resumed(folder)


@pytest.mark.parametrize("name", [LEDGER, HEAD, COPY, FILE_NAME])
def test_a_new_run_does_not_begin_beside_another_ones_files(folder, name, tmp_path):
    other = tmp_path / "left"
    other.mkdir()
    place = folder if name in (LEDGER, HEAD) else folder / "checkpoint-3"
    shutil.copy(place / name, other / name)
    with pytest.raises(LedgerError, match=f"holds {name} of another run"):
        RunLedger(other, PLAN).start(5)
    for run_id in (None, "another"):
        with pytest.raises(LedgerError, match="of another run"):
            refuse_foreign(other, run_id)
    refuse_foreign(other, read_run(folder).run_id)


# -- what weakens a run is not forgotten either ---


def test_what_weakens_a_run_is_a_line(folder):
    run = resumed(folder)
    run.weaken(Flags(released=("loss",), model_selection=True, rows_are_chunks=True))
    run.start(5)
    step(run)
    run.weaken(Flags(evaluation_compared=False))
    save_checkpoint(run)
    run.stop()
    expected = Weaknesses(
        released=("loss",), model_selection=True, rows_are_chunks=True, evaluation_compared=False
    )
    assert len(read_own(folder).digests) == 7  # that of the last weakness has no release
    again = resumed(folder)
    assert again.weaknesses == expected
    again.open()
    step(again)
    again.stop()
    assert read_run(folder).weaknesses == expected


def test_planted_weaknesses_that_are_forgotten_are_seen(folder, monkeypatch):
    run = resumed(folder)
    run.weaken(Flags(released=("loss",)))
    run.start(5)
    step(run)
    monkeypatch.setattr(run, "weaknesses", Weaknesses())
    with pytest.raises(LedgerError, match="This cannot change during a run"):
        step(run)
    run.stop()


# -- weights ---


def test_weights_of_a_run_are_not_taken_over_by_another(folder, tmp_path):
    other = begun(tmp_path / "other", 1)
    content = (folder / "checkpoint-3" / "model.safetensors").read_bytes()
    with pytest.raises(LedgerError, match="was saved by run"):
        other.go_with(folder / "checkpoint-3")
    other.stop()
    assert (folder / "checkpoint-3" / "model.safetensors").read_bytes() == content


def test_a_head_does_not_change_a_model(tmp_path):
    """Loaded by transformers, in shards, with other files left as they are."""
    model = tiny.model()
    folder = tmp_path / "saved"
    model.save_pretrained(folder, max_shard_size="10KB")
    masks = {"selection_masks.safetensors", "_released_rows.safetensors"}
    for name in masks:
        safetensors.torch.save_file({"a": torch.ones(3)}, folder / name)
    run = begun(tmp_path / "run")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    run.go_with(folder)
    run.stop()
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert all(head_in(path) == run.lines.head for path in shards)
    changed = {path.name for path in folder.iterdir() if before.get(path.name) != path.read_bytes()}
    assert changed == {*(path.name for path in shards), COPY}
    loaded = AutoModelForSequenceClassification.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


# -- a whole run ---


def test_a_whole_run_with_an_older_ledger_is_refused_until_it_is_put_back(run):
    whole = read_run(run).ledger
    shutil.copy(run / "checkpoint-2" / COPY, run / LEDGER)
    again = tiny.trainer(run, save_strategy="steps", save_steps=2)
    with pytest.raises(LedgerError, match="went back.*the longest copy: `cp ") as caught:
        again.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert len(again.ledger) == 0
    subprocess.run(shlex.split(str(caught.value).split("`")[1]), check=True)
    assert read_run(run).ledger == whole
    tiny.resumed(again, 2)
    assert again.state.global_step == 4
    assert again.ledger.steps() == read_run(run).ledger.steps() == 6  # the branch counts, too
    again.save_model(str(run / "final"))
    assert head_in(run / "final" / "model.safetensors") == again.run.book.lines.head
    assert read_copy(run / "final").ledger == again.ledger


def test_a_trainer_that_ended_leaves_what_a_later_one_saved(tmp_path):
    """Its older weights were there before the ledger refused them."""
    options = {"save_strategy": "steps", "save_steps": 1, "logging_strategy": "no"}
    ended = tiny.trained(tiny.trainer(tmp_path, max_steps=1, **options))
    later = tiny.resumed(tiny.trainer(tmp_path, max_steps=2, **options))
    later.save_model()
    saved = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    elsewhere = tmp_path.with_name("elsewhere")
    for save in (ended.save_model, lambda: ended.save_model(elsewhere), ended.create_model_card):
        with pytest.raises(LedgerError, match="another process has continued this run"):
            save()
    assert not list(elsewhere.glob("*"))
    assert saved == {path: path.read_bytes() for path in saved}
    later.save_model()


def test_releases_between_the_steps_of_a_search_leave_the_target_whole():
    """The ledger takes such steps for two searches. The budget took them for one and let 3.11 pass
    for 3."""
    given = {"num_examples": 1000, "expected_batch_size": 100, "clipping_norm": 0.5}
    plan = PrivacyPlan.create(**given, target_epsilon=3.0, max_steps=40, accountant="rdp")
    mechanism = replace(plan.mechanism, search=Search(5), noise_multiplier=2.4)
    plan, ledger = replace(plan, mechanism=mechanism), Ledger()
    for _ in range(2):
        ledger.append(plan.event(10), "training")
        ledger.append(PoissonSampledGaussian(50.0, 0.01, 1), "other")
    more = int(Budget(plan, ledger).allowed_steps(20)) - 20
    ledger.append(plan.event(more), "training")
    assert more >= 15 and 2.9 < ledger.epsilon(plan.delta, "rdp").value <= 3
