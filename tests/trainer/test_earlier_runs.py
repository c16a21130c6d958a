"""Runs on the same rows, one after the other: the later claims no more than the weakest of them."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import tiny
from statements import rewrite

from hf_dp.accounting import EARLIER
from hf_dp.errors import InvalidArgumentError, LedgerError, UnsupportedArgumentError
from hf_dp.plans.units import Users
from hf_dp.run.earlier import earlier_evidence
from hf_dp.run.gate import Observer
from hf_dp.run.ledger_file import COPY, LEDGER
from hf_dp.run.witnesses import read_run
from hf_dp.statement.evidence import FILE_NAME, disagreements, earlier_runs, read

pytestmark = pytest.mark.usefixtures("unchecked")

SAVING = {"save_strategy": "steps", "save_steps": 2}


def after(folder: Path, *earlier: Path, **options):
    """A trainer that counts others' runs."""
    return tiny.trainer(folder, earlier_runs=[str(path) for path in earlier], **options)


def trained(folder: Path, *earlier: Path, **options):
    trainer = tiny.trained(after(folder, *earlier, **options))
    assert disagreements(read(folder)) == []
    return trainer


@pytest.fixture(scope="module")
def frozen(tmp_path_factory) -> Path:
    """A run of DP-FP whose labels are public."""
    folder = tmp_path_factory.mktemp("frozen") / "first"
    trained(folder, privacy_mode="dp_fp", dp_fp_variant="frozen", max_steps=2)
    return folder


@pytest.fixture(scope="module")
def after_frozen(frozen):
    return trained(frozen.with_name("second"), frozen, **SAVING)


def folder_of(trainer) -> Path:
    return Path(trainer.args.output_dir)


def test_dp_sgd_after_public_labels_claims_no_labels(after_frozen, tmp_path):
    """The hole that was found: the later run's card claimed whole rows, labels included."""
    statement, second = after_frozen.privacy_statement(), folder_of(after_frozen)
    assert (statement.unit_code, statement.status) == ("features", "proven")
    assert "labels being public" in statement.sentence()
    assert any("entered the loss of the earlier run" in line for line in statement.not_covered)
    card = (second / "README.md").read_text()
    assert "labels being public" in card and "unit: features" in card
    third = trained(tmp_path, second, max_steps=1).privacy_statement()
    assert third.unit_code == "features"  # through the second, which names the first
    assert [claim.unit for claim in third.facts.earlier] == ["features", "example"]


def test_claims_of_earlier_runs_survive_a_resume(after_frozen, frozen, tmp_path):
    folder = Path(shutil.copytree(folder_of(after_frozen), tmp_path / "run"))
    before = read_run(folder).weaknesses.earlier
    assert len(before) == 1
    again = tiny.resumed(after(folder, frozen, **SAVING), 2)
    assert read_run(folder).weaknesses.earlier == before
    assert again.privacy_statement().unit_code == "features"


def test_a_resume_with_other_earlier_runs_is_refused(after_frozen, frozen, finished):
    """One more would never be recorded."""
    second = folder_of(after_frozen)
    for named in ([], [finished], [frozen, finished]):
        message = "`earlier_runs` to name what the ledger of this run began with"
        with pytest.raises(LedgerError, match=message):
            tiny.resumed(after(second, *named, **SAVING))


def test_a_resume_after_an_earlier_run_went_on_says_so(finished, tmp_path):
    """Right before: that other runs were named."""
    first, second = shutil.copytree(finished, tmp_path / "first"), tmp_path / "second"
    trained(second, first, max_steps=2, **SAVING)
    whole = read_run(second)
    tiny.resumed(after(first, max_steps=5, **SAVING))
    message = "4 releases, got 5: one of them has gone on(.|\n)*whose `earlier_runs` name this one"
    again = after(second, first, **SAVING)
    with pytest.raises(LedgerError, match=message):
        tiny.resumed(again)
    assert not len(again.ledger) and read_run(second) == whole
    both = after(tmp_path / "third", second, first)
    assert sum(entry.event.steps for entry in both.run.book.earlier_entries) == 4 + 2 + 5


def test_planted_claims_of_earlier_runs_that_are_not_passed_on_are_seen(
    frozen, tmp_path, monkeypatch
):
    monkeypatch.setattr("hf_dp.run.ledger.earlier_runs", lambda record: ())
    with pytest.raises(LedgerError, match="it counts earlier runs but names none"):
        trained(tmp_path, frozen, max_steps=1)


def test_an_insecure_or_released_earlier_run_weakens_the_later_one(tmp_path):
    trained(tmp_path / "insecure", insecure_seed=1, max_steps=1)
    later = trained(tmp_path / "after", tmp_path / "insecure", max_steps=1)
    assert later.privacy_statement().status == "not_private"
    first = tmp_path / "first"
    trained(first, release=["training_loss"], max_steps=1)
    statement = trained(tmp_path / "second", first, max_steps=1).privacy_statement()
    assert statement.status == "proven_weights_only"
    assert "training_loss (by the earlier run" in statement.sentence()
    # Its `privacy.json` is edited, and lost; its ledger is what it was.
    path = first / FILE_NAME
    rewrite(path, lambda data: data["plan"].update(released=[]))
    for lose in (lambda: None, path.unlink):
        lose()
        (record,) = earlier_evidence([str(first)], 40, "example", "zero_out")
        (claim,) = earlier_runs(record)
        assert claim.released == ("training_loss",)


class Watcher(Observer):
    """Sees what is not noised."""


def test_neither_logs_nor_epsilon_state_what_the_statement_does_not(tmp_path):
    """In a run that nothing is claimed for, and in one after it."""
    watched, seeded = tmp_path / "watched", tmp_path / "seeded"
    first = after(watched, max_steps=1)
    first.run.let_inside(Watcher())
    runs = [
        tiny.trained(first),
        trained(tmp_path / "after watched", watched, max_steps=1),
        trained(seeded, max_steps=1, insecure_seed=1),
        trained(tmp_path / "after seeded", seeded, max_steps=1),
    ]
    for each in runs:
        assert each.privacy_statement().epsilon is None
        assert not any("epsilon" in name for entry in each.state.log_history for name in entry)
        with pytest.raises(UnsupportedArgumentError, match="No epsilon holds for this run"):
            each.epsilon()


def test_an_earlier_run_whose_ledger_went_back_is_refused(run, tmp_path):
    """Its lost steps would be missing from this run's ledger, too."""
    shutil.copy(run / "checkpoint-2" / COPY, run / LEDGER)
    for path in (run, run / FILE_NAME):
        with pytest.raises(LedgerError, match="went back.*checkpoint-4"):
            after(tmp_path / "second", path)


OF_USERS = {"privacy_unit": "user", "users": dataclasses.asdict(Users("who"))}


@pytest.mark.parametrize(
    ("theirs", "error", "why"),
    [
        (OF_USERS, InvalidArgumentError, "with privacy_unit='.*', not 'user'"),
        ({"neighboring_relation": "add_remove"}, LedgerError, "`neighboring_relation`"),
    ],
)
def test_a_run_with_another_unit_or_relation_is_refused(finished, tmp_path, theirs, error, why):
    published = Path(shutil.copy(finished / FILE_NAME, tmp_path))
    rewrite(published, lambda data: data["plan"].update(theirs))
    with pytest.raises(error, match=why):
        after(tmp_path / "second", tmp_path)


def test_a_run_on_other_rows_and_none_at_all_are_refused(finished, tmp_path):
    rows = {"train_dataset": tiny.dataset(50)}
    expected = "to be a run with num_examples=50, not 40.*train on these alone, with other_training"
    with pytest.raises(InvalidArgumentError, match=expected):
        after(tmp_path / "second", finished, given=rows)
    with pytest.raises(LedgerError, match="first does not exist"):
        after(tmp_path / "second", tmp_path / "first")
    with pytest.raises(LedgerError, match="privacy.json is missing"):
        after(tmp_path / "second", tmp_path)


def test_a_checkpoint_stands_for_its_whole_run(finished, tmp_path):
    """Steps after the checkpoint saw the rows, too."""
    for name in ("checkpoint-2", f"checkpoint-2/{FILE_NAME}"):
        (entry,) = after(tmp_path / "later", finished / name).run.book.earlier_entries
        assert (entry.event.steps, entry.purpose) == (4, EARLIER)
    later = trained(tmp_path / "later", finished / "checkpoint-2", max_steps=1)
    assert later.ledger.steps(EARLIER) == 4 and later.ledger.steps() == 5
