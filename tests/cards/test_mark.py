"""A mark never goes back, whatever is written over it, and what is not a mark is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from hf_dp.accounting import Ledger
from hf_dp.errors import LedgerError
from hf_dp.plans import DpSgdPlan, PrivacyPlan
from hf_dp.run.mark import COPIED_MARK, RUN_MARK, Mark, read_mark, read_stamp, stamp, write_mark
from hf_dp.statement.weaknesses import EarlierRun, Weaknesses

PLAN = PrivacyPlan(1000, 100.0, 10, 1e-4, DpSgdPlan(1.0, 2.0))
FIRST = EarlierRun("first", "features", "record_zero_out", released=("training_loss",))


def mark_of(
    steps: int, run_id: str = "run-a", purpose: str = "training", **weaknesses: Any
) -> Mark:
    ledger = Ledger()
    ledger.append(PLAN.event(2), "selection")
    ledger.append(PLAN.event(steps), purpose)
    return Mark(run_id, ledger, Weaknesses(**weaknesses))


def same(one: Mark, other: Mark) -> bool:
    return one.extends(other) and other.extends(one)


def weights(folder: Path) -> Path:
    path = folder / "model.safetensors"
    safetensors.torch.save_file({"a": torch.ones(3)}, path, metadata={"format": "pt"})
    return path


class InAFile:
    """A mark in a file of its own."""

    def path(self, folder: Path) -> Path:
        return folder / RUN_MARK

    def put(self, path: Path, mark: Mark) -> None:
        write_mark(path, mark)

    def get(self, path: Path) -> Mark | None:
        return read_mark(path)


class InWeights:
    """A mark in the metadata of weights."""

    def path(self, folder: Path) -> Path:
        return weights(folder)

    def put(self, path: Path, mark: Mark) -> None:
        stamp(path, mark)

    def get(self, path: Path) -> Mark | None:
        return read_stamp(path)


@pytest.fixture(params=[InAFile(), InWeights()], ids=["file", "weights"])
def kind(request):
    return request.param


ALL = {
    "insecure_seed": True,
    "released": ("a", "b"),
    "model_selection": True,
    "rows_are_chunks": True,
}


@pytest.mark.parametrize(
    "mark",
    [
        mark_of(3),
        mark_of(3, **ALL, evaluation_compared=False, earlier=(FIRST,)),
        Mark("r", Ledger(), Weaknesses()),
    ],
)
def test_round_trip(kind, mark, tmp_path) -> None:
    path = kind.path(tmp_path)
    kind.put(path, mark)
    assert same(kind.get(path), mark)
    assert kind.get(path).weaknesses == mark.weaknesses


def test_a_later_mark_replaces_an_earlier_one_and_the_same_is_not_written_again(
    kind, tmp_path
) -> None:
    path = kind.path(tmp_path)
    kind.put(path, mark_of(3))
    kind.put(path, mark_of(5))
    assert same(kind.get(path), mark_of(5))
    written = path.stat().st_ino
    kind.put(path, mark_of(5))
    assert path.stat().st_ino == written


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (
            mark_of(2, released=("a",)),
            "2 of selection and 3 of training, which 2 of selection and 2 of training here do not",
        ),
        (
            mark_of(9, purpose="release", released=("a",)),
            "3 of training, which 2 of selection and 9 of release",
        ),
        (mark_of(9, run_id="run-b", released=("a",)), "mark of run run-a, and this is run run-b"),
        (mark_of(9), "released=.'a',.*as what weakens the run"),
    ],
)
def test_a_mark_never_goes_back(kind, new, message, tmp_path) -> None:
    path = kind.path(tmp_path)
    kind.put(path, mark_of(3, released=("a",)))
    content = path.read_bytes()
    with pytest.raises(LedgerError, match=message):
        kind.put(path, new)
    assert path.read_bytes() == content


def test_planted_mark_that_goes_back_is_seen(kind, tmp_path, monkeypatch) -> None:
    path = kind.path(tmp_path)
    kind.put(path, mark_of(3))
    monkeypatch.setattr("hf_dp.run.mark._refuse_to_lose", lambda *_: None)
    monkeypatch.setattr(Mark, "lacks", lambda *_: "forgetful")
    kind.put(path, mark_of(2))
    monkeypatch.undo()
    assert not kind.get(path).extends(mark_of(3))  # what test_a_mark_never_goes_back refuses


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda data: data.update(mark_version=2),
            "version 2; this hf_dp knows versions up to 1. Upgrade",
        ),
        (lambda data: data.update(mark_version=0), "edited or damaged"),
        (lambda data: data.update(mark_version="1"), "edited or damaged"),
        (lambda data: data.update(extra=1), "expected the keys"),
        (lambda data: data.pop("ledger"), "expected the keys"),
        (lambda data: data.update(run_id=""), "expected a run_id"),
        (lambda data: data.update(run_id=3), "expected a run_id"),
        (lambda data: data["ledger"][0].update(steps=0), "Row 0"),
        (lambda data: data.update(ledger="many"), "as a list of rows"),
        (lambda data: data["weaknesses"].update(released="loss"), "`released` to be a list"),
        (lambda data: data["weaknesses"].update(insecure_seed="no"), "insecure_seed"),
        (lambda data: data["weaknesses"].pop("earlier"), "missing .'earlier'"),
        (
            lambda data: data["weaknesses"].update(earlier=[{"run_id": "x"}]),
            "EarlierRun cannot be read",
        ),
        (lambda data: data.update(weaknesses=None), "Weaknesses cannot be read"),
    ],
)
def test_an_edited_mark_is_refused_with_its_name(edit, message, tmp_path) -> None:
    path = tmp_path / COPIED_MARK
    write_mark(path, mark_of(3))
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    for call in (read_mark, lambda p: write_mark(p, mark_of(9))):
        with pytest.raises(LedgerError, match=message) as caught:
            call(path)
        assert COPIED_MARK in str(caught.value)
    assert json.loads(path.read_text()) == data


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff", b'{"mark_version": NaN}', b"[" * 100_000]
)
def test_a_damaged_mark_is_refused(content, tmp_path) -> None:
    (tmp_path / RUN_MARK).write_bytes(content)
    with pytest.raises(LedgerError, match="edited or damaged.*Restore it from a backup"):
        read_mark(tmp_path / RUN_MARK)


@pytest.mark.parametrize(
    "missing", ["hf_dp_run_id", "hf_dp_ledger", "hf_dp_weaknesses", "hf_dp_mark_version"]
)
def test_weights_with_half_a_mark_are_refused(missing, tmp_path) -> None:
    path = weights(tmp_path)
    stamp(path, mark_of(3))
    metadata = dict(safetensors.safe_open(path, framework="pt").metadata())
    del metadata[missing]
    safetensors.torch.save_file({"a": torch.ones(3)}, path, metadata=metadata)
    with pytest.raises(LedgerError, match="expected the keys"):
        read_stamp(path)


def test_weights_with_a_damaged_ledger_are_refused(tmp_path) -> None:
    path = weights(tmp_path)
    stamp(path, mark_of(3))
    metadata = dict(safetensors.safe_open(path, framework="pt").metadata())
    safetensors.torch.save_file(
        {"a": torch.ones(3)}, path, metadata={**metadata, "hf_dp_ledger": "[{"}
    )
    with pytest.raises(LedgerError, match=r"model\.safetensors was edited or damaged"):
        read_stamp(path)


def test_weights_of_others_have_no_mark(tmp_path) -> None:
    assert read_stamp(weights(tmp_path)) is None
