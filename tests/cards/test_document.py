"""``privacy.json`` never loses evidence, whatever overwrites it and whenever the writer is killed."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from statements import FACTS, problems, rewrite
from statements import SMALL as PLAN

from hf_dp._dataclasses import plain
from hf_dp.accounting import Ledger
from hf_dp.errors import LedgerError
from hf_dp.statement import durable
from hf_dp.statement.durable import Beside
from hf_dp.statement.evidence import FILE_NAME, Evidence, read, write
from hf_dp.statement.statement import PrivacyStatement


def ledger_of(steps: int, purpose: str = "training") -> Ledger:
    ledger = Ledger()
    if steps:
        ledger.append(PLAN.event(steps), purpose)
    return ledger


def content(steps: int, run_id: str = "run-a", purpose: str = "training") -> Evidence:
    return Evidence(PLAN, ledger_of(steps, purpose), run_id)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return write(tmp_path, content(3))


def test_round_trip_while_it_runs_and_with_a_statement(tmp_path: Path) -> None:
    ledger = ledger_of(2, "selection")
    ledger.append(PLAN.event(3), "training")
    path = write(tmp_path / "made" / "on the way", Evidence(PLAN, ledger, "run-a"))
    for evidence in (read(path), read(path.parent)):
        assert (evidence.plan, evidence.ledger, evidence.run_id) == (PLAN, ledger, "run-a")
        assert (evidence.statement, evidence.facts, evidence.status) == (None, None, "running")
        with pytest.raises(LedgerError, match="has not ended"):
            evidence.restated()
    statement = PrivacyStatement.from_ledger(PLAN, ledger, FACTS)
    write(path, Evidence(PLAN, ledger, "run-a").stating(statement, Beside()))
    evidence = read(path)
    assert (evidence.status, evidence.facts) == ("proven", FACTS)
    assert evidence.statement == plain(statement.to_dict()) and evidence.restated() == statement
    ledger.append(PLAN.event(1), "training")
    write(path, Evidence(PLAN, ledger, "run-a"))  # the run goes on
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
def test_evidence_is_never_overwritten(written: Path, new: Evidence, message: str) -> None:
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
def test_a_kill_before_the_replacement_leaves_the_old_file(written, monkeypatch, where):
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
    """The process ends between the temporary file and the replacement, and cleans nothing up."""
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
    """File to disk, rename, folder to disk: a power cut in any other order can lose a step."""
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
        (b"\xff\xfe\x00", "cannot be read"),
        ("", "not complete JSON"),
        ("[]", "not a privacy.json"),
        ("{}", "not a privacy.json"),
        ('{"schema_version": NaN}', "NaN"),
        ('{"schema_version": 1e999}', "not complete JSON"),
        ("[" * 100_000, "not complete JSON"),
        ('{"schema_version": 1, "schema_version": 1}', "twice"),
        ('{"schema_version": 1}', "edited"),
        ('{"schema_version": "1"}', "edited"),
        ('{"schema_version": 0}', "edited"),
        ('{"schema_version": true}', "edited"),
        ('{"schema_version": 4}', "edited"),
        ('{"schema_version": 6}', "Upgrade hf_dp"),
    ],
)
def test_unreadable(tmp_path: Path, text: str | bytes, message: str) -> None:
    content = text if isinstance(text, bytes) else text.encode()
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(LedgerError, match=message) as caught:
        read(tmp_path)
    assert FILE_NAME in str(caught.value)


def of_rows(**values: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        for row in data["ledger"]:
            row.update(values)

    return change


def of(part: str, **values: Any) -> Callable[[Any], None]:
    return lambda data: data[part].update(values)


def of_all(**values: Any) -> Callable[[Any], None]:
    return lambda data: data.update(values)


def of_draw(most: object) -> Callable[[Any], None]:
    draw = {"name": "truncated_poisson", "max_batch_size": most}
    return lambda data: data["plan"]["mechanism"].update(draw=draw)


EDITED = "was edited or damaged"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        # what says more than the evidence in the same file
        (of_rows(noise_multiplier=50.0), "not the plan's"),
        (of_rows(sample_rate=1e-4), "not the plan's"),
        (of_rows(steps=7), "steps is stated as 10"),
        (lambda data: data["ledger"].clear(), "steps is stated as 10"),
        (of("plan", insecure_seed=True), "status is stated as 'proven'"),
        (of("plan", released=["training_loss"]), "status is stated as 'proven'"),
        (of_draw(120), "not the plan's"),
        (of("statement", status="not_private"), "status is stated as"),
        (of("statement", unit="user"), "unit is stated as"),
        (of("statement", neighboring_relation="any change"), "neighboring_relation is stated as"),
        (of("statement", num_examples=10**9), "num_examples is stated as"),
        (of("statement", accountant="rdp"), "accountant is stated as"),
        (of("statement", epsilon=0.1), "epsilon is stated as 0.1"),
        (of("statement", epsilon="0.1"), "epsilon is stated as '0.1'"),
        (of("statement", epsilon=[1]), r"epsilon is stated as \[1\]"),
        (of("statement", more=1), "more is stated as 1"),
        # what hf_dp cannot have written
        (of("plan", delta=0.9999), "target_delta"),
        (of("plan", steps="a"), "`steps` to be a number"),
        (of("plan", released=[5, None]), "`released` to be a list of names"),
        (of("plan", num_examples=10**9), EDITED),
        (of("plan", num_examples=0), EDITED),
        (of("plan", num_examples="many"), EDITED),
        (lambda data: data["plan"].pop("delta"), EDITED),
        (lambda data: data["plan"].pop("run_id"), EDITED),
        (of_draw("a"), "`max_logical_batch_size` to be a number"),
        (of("facts", trust=1), "adds fields"),
        (of_rows(noise_multiplier=10**400), "noise_multiplier"),
        (of_rows(type="Laplace"), EDITED),
        (of_rows(steps=0), EDITED),
        (of_rows(batch_size=97), "batch_size"),  # a realized one has no place
        (lambda data: data["ledger"][0].pop("sample_rate"), EDITED),
        (of_all(ledger=None), EDITED),
        (of_all(plan=3), EDITED),
        (of_all(extra=1), "and the keys"),
        (lambda data: data.pop("statement"), "and the keys"),
        (of_all(statement=3), "its statement to be a mapping"),
        (of_all(statement={"status": "sure"}), "a statement with a status"),
        (of_all(facts=None), "expected facts"),
        (of_all(files={"model.safetensors": "0"}), "expected digests"),
        (of_all(privacy_section="0"), "expected digests"),
        (of_all(ledger_head=3), EDITED),
        (of_all(ledger_head={"run_id": "run-b", "lines": 0, "digest": ""}), "of run run-a"),
        (of_all(ledger_head={"run_id": "run-a", "lines": 1, "digest": ""}), "SHA-256 of line 1"),
    ],
)
def test_edited_with_a_digest_that_agrees(tmp_path: Path, change: Any, found: str) -> None:
    ledger = ledger_of(10)
    statement = PrivacyStatement.from_ledger(PLAN, ledger, FACTS)
    path = write(tmp_path, Evidence(PLAN, ledger, "run-a").stating(statement, Beside()))
    assert problems(path) == ""
    rewrite(path, change)
    assert re.search(found, problems(path)), problems(path)
