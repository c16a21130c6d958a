"""Runs one after the other on the same rows: the later one claims no more than the weakest of
them."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import tiny
from statements import rewrite

from hf_dp.accounting import EARLIER
from hf_dp.errors import InvalidArgumentError, LedgerError
from hf_dp.plans.units import Users
from hf_dp.run.earlier import earlier_claims
from hf_dp.run.ledger_file import COPY, HEAD, LEDGER
from hf_dp.run.witnesses import read_run
from hf_dp.statement.record import FILE_NAME, DamagedRecordError, disagreements, read

pytestmark = pytest.mark.usefixtures("unchecked")

FROZEN = {"privacy_mode": "dp_fp", "dp_fp_variant": "frozen"}


def run(folder: Path, *earlier: Path, **options):
    """A trained run after others."""
    options.setdefault("accountant", "rdp")
    trainer = tiny.trainer(folder, earlier_runs=[str(path) for path in earlier], **options)
    trainer.train()
    assert disagreements(read(folder)) == []
    return trainer


def test_dp_sgd_after_public_labels_claims_no_labels(tmp_path):
    """The hole that was found: the later run's card claimed whole rows, labels included."""
    run(tmp_path / "first", **FROZEN)
    later = run(tmp_path / "second", tmp_path / "first")
    statement = later.privacy_statement()
    assert (statement.unit_code, statement.status) == ("features", "proven")
    assert "labels being public" in statement.sentence()
    assert any("entered the loss of the earlier run" in line for line in statement.not_covered)
    card = (tmp_path / "second" / "README.md").read_text()
    assert "labels being public" in card and "unit: features" in card
    third = run(tmp_path / "third", tmp_path / "second")
    assert (
        third.privacy_statement().unit_code == "features"
    )  # through the second, which names the first
    assert [claim.unit for claim in third.privacy_statement().facts.earlier] == [
        "features",
        "example",
    ]


def test_planted_claims_of_earlier_runs_that_are_not_passed_on_are_seen(tmp_path, monkeypatch):
    run(tmp_path / "first", **FROZEN)
    monkeypatch.setattr("hf_dp.run.private_run.earlier_claims", lambda args: ())
    with pytest.raises(LedgerError, match="it counts earlier runs and names none"):
        run(tmp_path / "second", tmp_path / "first")


def test_a_released_loss_of_an_earlier_run_weakens_the_later_one(tmp_path):
    run(tmp_path / "first", release=["training_loss"])
    later = run(tmp_path / "second", tmp_path / "first")
    statement = later.privacy_statement()
    assert statement.status == "proven_weights_only"
    assert "training_loss (by the earlier run" in statement.sentence()


def test_an_insecure_earlier_run_makes_the_later_one_not_private(tmp_path):
    run(tmp_path / "first", insecure_seed=1)
    assert run(tmp_path / "second", tmp_path / "first").privacy_statement().status == "not_private"


def test_claims_of_earlier_runs_survive_a_resume(tmp_path):
    run(tmp_path / "first", release=["training_loss"], **FROZEN)
    options = {"save_strategy": "steps", "save_steps": 2}
    run(tmp_path / "second", tmp_path / "first", **options)
    before = read_run(tmp_path / "second").weaknesses.earlier
    assert len(before) == 1
    names = [str(tmp_path / "first")]
    again = tiny.trainer(tmp_path / "second", earlier_runs=names, accountant="rdp", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "second" / "checkpoint-2"))
    assert read_run(tmp_path / "second").weaknesses.earlier == before
    assert again.privacy_statement().unit_code == "features"


def test_a_resume_with_other_earlier_runs_is_refused(tmp_path):
    for name in ("first", "other"):
        run(tmp_path / name)
    options = {"save_strategy": "steps", "save_steps": 2}
    run(tmp_path / "second", tmp_path / "first", **options)
    checkpoint = str(tmp_path / "second" / "checkpoint-2")
    for named in ([], ["other"], ["first", "other"]):
        names = [str(tmp_path / name) for name in named]
        again = tiny.trainer(tmp_path / "second", earlier_runs=names, accountant="rdp", **options)
        with pytest.raises(
            LedgerError, match="`earlier_runs` to name what the ledger of this run began with"
        ):
            again.train(resume_from_checkpoint=checkpoint)


def test_an_earlier_run_whose_ledger_went_back_is_refused(tmp_path):
    """Its lost steps would be missing from this run's ledger, too."""
    run(tmp_path / "first", save_strategy="steps", save_steps=2)
    shutil.copy(tmp_path / "first" / "checkpoint-2" / COPY, tmp_path / "first" / LEDGER)
    for name in ("first", f"first/{FILE_NAME}"):
        with pytest.raises(LedgerError, match="went back.*checkpoint-4"):
            tiny.trainer(tmp_path / "second", earlier_runs=[str(tmp_path / name)])


@pytest.mark.parametrize("states", [True, False])
def test_what_the_ledger_of_an_earlier_run_knows_weakens_it(tmp_path, states):
    """Its `privacy.json` was edited; its ledger is what it was."""
    run(tmp_path / "first", release=["training_loss"])
    path = tmp_path / "first" / FILE_NAME
    rewrite(path, lambda data: data["plan"].update(released=[]))
    if not states:
        path.unlink()
    args = tiny.arguments(tmp_path / "second", earlier_runs=[str(tmp_path / "first")])
    assert [claim.released for claim in earlier_claims(args.earlier_runs)] == [("training_loss",)]


@pytest.mark.parametrize(
    ("theirs", "error", "why"),
    [
        (
            {"privacy_unit": "user", "users": dataclasses.asdict(Users("who"))},
            InvalidArgumentError,
            "with privacy_unit='.*', not 'user'",
        ),
        ({"neighboring_relation": "add_remove"}, DamagedRecordError, "`neighboring_relation`"),
    ],
)
def test_a_run_with_another_unit_or_relation_is_refused(tmp_path, theirs, error, why):
    run(tmp_path / "first")
    path = tmp_path / "first" / FILE_NAME
    rewrite(path, lambda data: data["plan"].update(theirs))
    for file in (LEDGER, HEAD):  # as it was published
        (path.parent / file).unlink()
    with pytest.raises(error, match=why):
        tiny.trainer(tmp_path / "second", earlier_runs=[str(tmp_path / "first")])


def test_a_checkpoint_stands_for_its_whole_run(tmp_path):
    """Steps after the checkpoint saw the rows, too."""
    run(tmp_path / "first", save_strategy="steps", save_steps=2)
    for number, name in enumerate(("checkpoint-2", f"checkpoint-2/{FILE_NAME}")):
        later = run(tmp_path / f"later {number}", tmp_path / "first" / name)
        assert later.ledger.steps(EARLIER) == 4 and later.ledger.steps() == 8
