"""``privacy.json`` never loses evidence, whatever is written over it and whenever the writer is
killed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from statements import FACTS, rewrite
from statements import SMALL as PLAN

from hf_dp._dataclasses import plain
from hf_dp.accounting import Ledger
from hf_dp.errors import LedgerError
from hf_dp.statement import durable
from hf_dp.statement.digests import Beside
from hf_dp.statement.record import FILE_NAME, PrivacyRecord, disagreements, read, write
from hf_dp.statement.statement import PrivacyStatement


def ledger_of(steps: int, purpose: str = "training") -> Ledger:
    ledger = Ledger()
    if steps:
        ledger.append(PLAN.event(steps), purpose)
    return ledger


def content(steps: int, run_id: str = "run-a", purpose: str = "training") -> dict[str, Any]:
    return PrivacyRecord(PLAN, ledger_of(steps, purpose), run_id).to_dict()


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return write(tmp_path, content(3))


def test_round_trip_while_it_runs_and_with_a_statement(tmp_path: Path) -> None:
    ledger = ledger_of(2, "selection")
    ledger.append(PLAN.event(3), "training")
    path = write(tmp_path / "made" / "on the way", PrivacyRecord(PLAN, ledger, "run-a").to_dict())
    for record in (read(path), read(path.parent)):
        assert (record.plan, record.ledger, record.run_id) == (PLAN, ledger, "run-a")
        assert (record.statement, record.facts, record.status) == (None, None, "running")
        with pytest.raises(LedgerError, match="has not ended"):
            record.restated()
    statement = PrivacyStatement.from_ledger(PLAN, ledger, FACTS)
    write(path, PrivacyRecord(PLAN, ledger, "run-a").stating(statement, Beside()).to_dict())
    record = read(path)
    assert (record.status, record.statement, record.facts) == (
        "proven",
        plain(statement.to_dict()),
        FACTS,
    )
    assert record.restated() == statement
    ledger.append(PLAN.event(1), "training")
    write(path, PrivacyRecord(PLAN, ledger, "run-a").to_dict())  # the run goes on
    assert read(path).status == "running"


def test_a_longer_ledger_replaces_a_shorter_one(written: Path) -> None:
    write(written, content(3))
    write(written, content(5))
    assert read(written).ledger.steps() == 5
    assert [path.name for path in written.parent.iterdir()] == [FILE_NAME]


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (content(2), "under-report"),
        (content(0), "under-report"),
        (content(9, purpose="selection"), "under-report"),
        (content(9, run_id="run-b"), "run-a"),
    ],
)
def test_evidence_is_never_overwritten(written: Path, new: dict[str, Any], message: str) -> None:
    before = written.read_bytes()
    with pytest.raises(LedgerError, match=message):
        write(written, new)
    assert written.read_bytes() == before


def test_a_damaged_file_is_not_overwritten(written: Path) -> None:
    written.write_text('{"schema_version": 1, "pl')
    with pytest.raises(LedgerError, match="not complete JSON"):
        write(written, content(9))
    assert written.read_text() == '{"schema_version": 1, "pl'


@pytest.mark.parametrize("where", ["replace", "fsync"])
def test_a_kill_before_the_replacement_leaves_the_old_file(
    written: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    before = written.read_bytes()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(durable.os, where, killed)
        with pytest.raises(KeyboardInterrupt):
            write(written, content(4))
    assert written.read_bytes() == before
    assert [path.name for path in written.parent.iterdir()] == [FILE_NAME]
    write(written, content(4))
    assert read(written).ledger.steps() == 4


def test_a_hard_kill_leaves_the_old_file(written: Path) -> None:
    """The process ends between the temporary file and the replacement, with no chance to clean
    up."""
    before = written.read_bytes()
    child = os.fork()
    if child == 0:
        durable.os.replace = lambda *_: os._exit(9)  # type: ignore[assignment]
        write(written, content(4))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert written.read_bytes() == before
    write(written, content(4))
    assert read(written).ledger.steps() == 4


def test_order_of_durability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File to disk, then rename, then folder to disk: any other order can lose a step after a power
    cut."""
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def seen_fsync(descriptor: int) -> None:
        calls.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    def seen_replace(old: Path, new: Path) -> None:
        assert Path(old).parent == Path(new).parent
        calls.append("replace")
        replace(old, new)

    monkeypatch.setattr(durable.os, "fsync", seen_fsync)
    monkeypatch.setattr(durable.os, "replace", seen_replace)
    write(tmp_path, content(1))
    assert calls == ["file", "replace", "folder"]


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"privacy\.json is missing.*hf-dp account ledger"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not complete JSON"),
        ("[]", "not a privacy record"),
        ("{}", "not a privacy record"),
        ('{"schema_version": NaN}', "NaN"),
        ('{"schema_version": 1, "schema_version": 1}', "twice"),
        ('{"schema_version": 1}', "edited"),
        ('{"schema_version": "1"}', "edited"),
        ('{"schema_version": 0}', "edited"),
        ('{"schema_version": true}', "edited"),
        ('{"schema_version": 4}', "edited"),
        ('{"schema_version": 6}', "Upgrade hf_dp"),
    ],
)
def test_unreadable(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(LedgerError, match=message) as caught:
        read(tmp_path)
    assert FILE_NAME in str(caught.value)


def test_not_text(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LedgerError, match=r"privacy\.json cannot be read"):
        read(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["ledger"][0].update(type="Laplace"),
        lambda data: data["ledger"][0].update(steps=0),
        lambda data: data["ledger"][0].pop("sample_rate"),
        lambda data: data.update(ledger=None),
        lambda data: data.update(extra=1),
        lambda data: data.pop("statement"),
        lambda data: data.update(statement={"status": "proven"}),
        lambda data: data.update(files={"model.safetensors": "0"}),
        lambda data: data.update(privacy_section="0"),
        lambda data: data["plan"].update(num_examples=10**9),
        lambda data: data["plan"].update(num_examples=0),
        lambda data: data["plan"].update(num_examples="many"),
        lambda data: data["plan"].pop("delta"),
        lambda data: data["plan"].pop("run_id"),
        lambda data: data.update(plan=3),
        lambda data: data.update(ledger_head=3),
        lambda data: data.update(ledger_head={"run_id": "run-b", "lines": 0, "digest": ""}),
        lambda data: data.update(ledger_head={"run_id": "run-a", "lines": 1, "digest": ""}),
    ],
)
def test_edited(written: Path, change: Any) -> None:
    rewrite(written, change)
    with pytest.raises(LedgerError, match=r"privacy\.json"):
        read(written)


def test_a_ledger_edited_under_its_statement_is_found(tmp_path: Path) -> None:
    statement = PrivacyStatement.from_ledger(PLAN, ledger_of(3), FACTS)
    record = PrivacyRecord(PLAN, ledger_of(3), "run-a").stating(statement, Beside())
    path = write(tmp_path, record.to_dict())
    assert disagreements(read(path)) == []
    rewrite(path, lambda data: data["ledger"][0].update(steps=1))
    assert disagreements(read(path))


def test_a_malformed_document_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(LedgerError):
        write(tmp_path, {**content(1), "extra": 1})
    assert not list(tmp_path.iterdir())


def test_a_realised_batch_size_has_no_place(tmp_path: Path) -> None:
    data = content(1)
    data["ledger"][0]["batch_size"] = 97
    with pytest.raises(LedgerError, match="batch_size"):
        write(tmp_path, data)
