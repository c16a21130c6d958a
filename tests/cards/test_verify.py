"""``hf-dp verify``: what was changed after a run is found, and named."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from huggingface_hub import ModelCard
from statements import rewrite

from hf_dp.cards.verify import FAILED, NOT_CHECKED, NOTICE, OK, Report, card_files, verify
from hf_dp.cli.main import main
from hf_dp.errors import LedgerError
from hf_dp.statement.evidence import FILE_NAME

Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps, with a checkpoint after the first."""
    folder = tmp_path_factory.mktemp("run") / "ours"
    saves = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    trainer = tiny.trainer(folder, accountant="rdp", **saves)
    trainer.describe(license="mit", language="en", dataset="org/rows")
    trainer.train()
    trainer.save_model()
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def failures(report: Report) -> str:
    return "\n".join(f"{c.about}: {c.words}" for c in report.checks if c.outcome == FAILED)


def test_a_saved_run_is_verified(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = verify(copy)
    assert report.outcome == OK, report
    assert {check.outcome for check in report.checks} == {OK, NOTICE}
    assert [c.about for c in report.checks if c.outcome == NOTICE] == ["author"]
    assert main(["verify", str(copy)]) == 0
    assert "verified: The released weights are (" in capsys.readouterr().out
    assert main(["verify", str(copy), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outcome"] == OK


def in_record(change: Callable[[Any], Any], renew: bool = False) -> Change:
    return lambda folder: rewrite(folder / FILE_NAME, change, renew=renew)


def of_another_run(data: Any) -> None:
    data["plan"]["run_id"] = data["ledger_head"]["run_id"] = "f" * 32


def in_card(old: str, new: str) -> Change:
    def change(folder: Path) -> None:
        text = (folder / "README.md").read_text()
        assert re.search(old, text), text
        (folder / "README.md").write_text(re.sub(old, new, text, count=1))

    return change


def in_block(change: Callable[[Any], Any]) -> Change:
    def edit(folder: Path) -> None:
        card = ModelCard.load(folder / "README.md")
        change(card.data["differential_privacy"])
        card.save(folder / "README.md")

    return edit


def flip(name: str, at: float) -> Change:
    """Flip one bit of a file, at a place between its beginning (0) and its end (1)."""

    def change(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[int(at * (len(data) - 1))] ^= 1
        (folder / name).write_bytes(bytes(data))

    return change


def cut(name: str) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100])


WRITTEN = "it is not what was written"
TAMPERINGS: dict[str, tuple[Change, str]] = {
    "epsilon": (in_record(lambda d: d["statement"].update(epsilon=0.1)), WRITTEN),
    "delta": (in_record(lambda d: d["plan"].update(delta=1e-9)), WRITTEN),
    "running": (in_record(lambda d: d.update(facts=None, statement=None)), WRITTEN),
    "event dropped": (in_record(lambda d: d["ledger"].pop()), WRITTEN),
    "sigma": (in_record(lambda d: d["ledger"][0].update(noise_multiplier=99.0)), WRITTEN),
    "weaknesses": (in_record(lambda d: d["plan"].update(released=["x"])), WRITTEN),
    "what trained": (in_record(lambda d: d["facts"].update(trained="nothing")), WRITTEN),
    "license in the evidence": (in_record(lambda d: d["card"].update(license="gpl")), WRITTEN),
    "a digest cut out": (in_record(lambda d: d["files"].clear()), WRITTEN),
    "a key cut out": (in_record(lambda d: d.pop("digest")), "the keys"),
    "no longer JSON": (cut(FILE_NAME), "is not complete JSON"),
    "no evidence": (lambda folder: (folder / FILE_NAME).unlink(), "is missing"),
    "a tensor": (flip("model.safetensors", 1.0), "model.safetensors is not what was saved"),
    "a shorter file of weights": (cut("model.safetensors"), "model.safetensors is not what was"),
    "epsilon in the sentence": (
        in_card(r"weights are \(\d+\.\d+", "weights are (0.100"),
        "section Privacy does not agree with the digest",
    ),
    "epsilon in the table": (in_card(r"\| rdp \| \d+", "| rdp | 0"), "section Privacy does not"),
    "an item not covered": (in_card(r"- Hyperparameter tuning.*\n", ""), "section Privacy does not agree"),
    "in short": (in_card(r"names at most \d", "names at most 0."), "section Privacy does not"),
    "no section": (in_card("## Privacy", "## Something"), "no section Privacy, or several"),
    "epsilon in the block": (in_block(lambda block: block.update(epsilon=0.1)), "differential_privacy block does not agree"),
    "unit in the block": (in_block(lambda block: block.update(unit="user")), "differential_privacy block does not agree"),
    "steps in the block": (in_block(lambda block: block.update(steps=1)), "block does not agree"),
    "no block": (in_card("differential_privacy:", "dp:"), "block does not agree"),
    "broken YAML": (in_card("license: mit", "license: [mit"), "card: it cannot be read"),
    # with a digest that agrees; each kind of it: tests/cards/test_document.py
    "another run": (in_record(of_another_run, True), "model.safetensors is of another run"),
    "its epsilon": (in_record(lambda d: d["statement"].update(epsilon=0.1), True), "epsilon is stated as 0.1"),
    "a claim more": (in_record(lambda d: d["statement"].update(trust="me"), True), "trust is stated as 'me'"),
    "its ledger": (in_record(lambda d: d["ledger"][0].update(noise_multiplier=99.0), True), "not the plan's"),
    "tags that are none": (in_record(lambda d: d["card"].update(tags=3), True), "cannot be read"),
    "an un-noised metric": (in_record(lambda d: d["card"].update(metrics={"train_loss": 0.1}), True), "cannot be read"),
    "a card of nothing": (in_record(lambda d: d.update(card={}), True), "cannot be read"),
    "a fact that is none": (in_record(lambda d: d["facts"].update(precision=3), True), "section Privacy does not agree"),
}  # fmt: skip


def hidden(folder: Path) -> None:
    """Put the true section into a comment, and a false one after it."""
    text = (folder / "README.md").read_text()
    begin, end = text.index("## Privacy"), text.index("## How it was trained")
    section = text[begin:end]
    false = re.sub(r"weights are \(\d+\.\d+", "weights are (0.010", section)
    text = f"{text[:begin]}<!--\n{section}\n-->\n\n{false}{text[end:]}"
    (folder / "README.md").write_text(text)


def before_the_section(added: str) -> Change:
    return in_card("## Privacy", added + "\n\n## Privacy")


def loads(name: str, weights: str) -> Change:
    """Have transformers load other weights than those of the run."""

    def change(folder: Path) -> None:
        (folder / weights).parent.mkdir(exist_ok=True)
        shutil.copy(folder / "model.safetensors", folder / weights)
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**config, "transformers_weights": weights}))

    return change


def added(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"weights")

    return change


CARD_TRICKS: dict[str, tuple[Change, str]] = {
    "a false section, the true one in a comment": (hidden, "no section Privacy, or several"),
    "a claim before the section": (before_the_section("These weights are (0.01, 1e-9)-private."), "section Privacy does not agree"),
    "a comment opened before it": (before_the_section("<!--"), "section Privacy does not agree"),
    "a fence opened before it": (before_the_section("~~~"), "section Privacy does not agree"),
    "another title": (in_card(r"\n# .*", "\n# (0.01, 1e-9)-private"), "section Privacy does not"),
    "a second section": (
        lambda folder: (folder / "README.md").open("a").write("\n## Privacy\n\nepsilon 0.01\n"),
        "no section Privacy, or several",
    ),
    "other line breaks": (in_card("- \\*\\*Protects", "\u2028- **Protects"), "section Privacy does not"),
    "a key twice": (in_card("license: mit", "license: mit\nlicense: mit"), "stands twice"),
    "other weights by config.json": (loads("config.json", "_evil.safetensors"), "_evil.safetensors"),
    "weights in a folder": (loads("config.json", "sub/evil.safetensors"), "sub/evil.safetensors"),
    "config.json": (lambda folder: (folder / "config.json").write_text("{}"), "config.json is not what was saved"),
    "an index of shards": (added("model.safetensors.index.json"), "nothing vouches for model.safetensors.index.json"),
    "pickled weights": (added("pytorch_model.bin"), "nothing vouches for pytorch_model.bin"),
    "capital letters": (added("MODEL.SAFETENSORS"), "nothing vouches for MODEL.SAFETENSORS"),
    "another format": (added("model.gguf"), "nothing vouches for model.gguf"),
    "deeper": (added("a/b/adapter_model.safetensors"), "a/b/adapter_model.safetensors"),
    "a selection": (added("selection.json"), "nothing vouches for selection.json"),
}  # fmt: skip
TAMPERINGS |= CARD_TRICKS


@pytest.mark.parametrize("kind", TAMPERINGS)
def test_tampering_is_caught_by_name(copy: Path, kind: str) -> None:
    change, message = TAMPERINGS[kind]
    change(copy)
    report = verify(copy)
    assert report.outcome == FAILED
    assert message in failures(report)


def test_an_older_ledger_is_caught(copy: Path) -> None:
    older = copy / "checkpoint-1"
    assert verify(older).outcome == OK
    for name in (FILE_NAME, "README.md"):
        shutil.copy(older / name, copy / name)
        assert "model.safetensors was saved later than privacy.json" in failures(verify(copy))


def unmarked(weights: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_file(load_file(weights), weights, metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "model-00001-of-00002.safetensors"])
def test_a_card_does_not_vouch_for_foreign_weights(copy: Path, name: str) -> None:
    shutil.copy(copy / "model.safetensors", copy / name)
    assert f"nothing vouches for {name}" in failures(verify(copy))
    unmarked(copy / name)  # names no run
    with pytest.raises(LedgerError, match=f"nothing vouches for {name}"):
        card_files(copy)


def test_a_card_without_weights_keeps_their_digests(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert main(["card", str(copy)]) == 0
    assert verify(copy).outcome == NOT_CHECKED
    assert main(["verify", str(copy)]) == 3
    (copy / "model.safetensors").write_bytes(b"other")
    assert main(["verify", str(copy)]) == 1
    with pytest.raises(LedgerError, match="to be a safetensors file"):
        card_files(copy)


def test_an_edit_elsewhere_on_the_card_is_a_notice(copy: Path) -> None:
    in_card("license: mit", "license: apache-2.0")(copy)
    report = verify(copy)
    assert report.outcome == OK
    (notice,) = [c for c in report.checks if c.outcome == NOTICE and c.about == "card"]
    assert "edited outside" in notice.words


def test_what_agrees_with_itself_is_said_to_prove_no_author(copy: Path) -> None:
    """Everything is made anew by somebody who says that the noise was larger."""
    lie = 50.0

    def change(data: Any) -> None:
        data["plan"]["noise_multiplier"] = data["plan"]["mechanism"]["noise_multiplier"] = lie
        data["plan"]["noise_std"] *= lie / data["ledger"][0]["noise_multiplier"]
        data["ledger"][0]["noise_multiplier"] = lie
        data["plan"]["target_epsilon"] = None

    forge(copy, change)
    report = verify(copy)
    assert report.outcome == OK, failures(report)
    assert "anyone who can write these files" in report.checks[-1].words


def forge(folder: Path, change: Callable[[Any], Any]) -> None:
    """Change plan and ledger, and make statement, card, what the weights name, and digests agree."""
    from safetensors.torch import load_file, save_file

    from hf_dp.cards.verify import file_digests
    from hf_dp.run.witnesses import put_head
    from hf_dp.statement.durable import Beside
    from hf_dp.statement.evidence import read

    rewrite(folder / FILE_NAME, change)
    evidence = read(folder)
    statement = evidence.restated()
    weights = folder / "model.safetensors"
    save_file(load_file(weights), weights, metadata={"format": "pt"})
    put_head(weights, evidence.head)
    for name in ("ledger.jsonl", "_ledger_head.json"):  # not published
        (folder / name).unlink()
    document = evidence.stating(statement, Beside(files=file_digests(folder)))
    (folder / FILE_NAME).write_text(document.text())
    (folder / "README.md").unlink()
    for name, content in card_files(folder).items():
        (folder / name).write_bytes(content)


def test_planted_verify_without_digests_is_seen(copy, monkeypatch):
    """Without the comparison of digests, edits of the prose would pass."""
    found = json.loads((copy / FILE_NAME).read_text())["digest"]
    monkeypatch.setattr("hf_dp.statement.evidence.digest_of", lambda value: found)
    change, _ = TAMPERINGS["what trained"]
    change(copy)
    assert "not what was written" not in failures(verify(copy))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["verify", "no such folder"], "folder or a repository like 'organization/name'"),
        (["verify", "org/model"], "cannot be fetched from the Hub"),
        (["card", "no such folder"], "folder no such folder does not exist"),
        (["card", ".", "--repository", "a b"], "to be a repository id"),
        (["card", ".", "--license", "mine"], "privacy.json is missing"),
    ],
)
def test_bad_arguments_are_named(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert message in capsys.readouterr().err
