"""What a folder would publish: of whole models and adapters, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from loopback_hub import BASE
from safetensors.torch import load_file, save_file

from hf_dp import save_run
from hf_dp.accounting import LedgerEntry
from hf_dp.cards.verify import verify
from hf_dp.cli.main import main
from hf_dp.errors import PublishError, UnsupportedModelError
from hf_dp.publishing.publication import Publication
from hf_dp.run.ledger_file import read_own, write_line
from hf_dp.run.witnesses import read_run
from hf_dp.statement.facts import Weaknesses

CARD_AND_TOKENIZER = {"README.md", "privacy.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.mark.parametrize(
    ("method", "own"),
    [
        ("full", {"model.safetensors", "config.json"}),
        ("lora", {"adapter_model.safetensors", "adapter_config.json"}),
        ("frost", {"adapter_model.safetensors", "adapter_config.json", "selection.json"}),
    ],
)
@pytest.mark.parametrize("checkpoint", ["", "checkpoint-2"])
def test_a_run_goes_as_what_loading_and_checking_need(trained, method, own, checkpoint):
    found = Publication.of(trained(method) / checkpoint, "you/model", BASE)
    assert found.refusals == ()
    assert set(found.files) == set(found.goes) == CARD_AND_TOKENIZER | own
    assert {"training_args.bin"} <= set(found.stays)
    assert {op.path_in_repo for op in found.additions()} == set(found.files)
    assert found.record is not None and found.record.ledger.steps("training") == (
        2 if checkpoint else 4
    )
    assert found.size == sum(len(as_bytes(each)) for each in found.files.values())
    for name, content in found.files.items():
        assert str(trained(method)).encode() not in as_bytes(content), name


def as_bytes(content: bytes | Path) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()


def test_an_adapter_names_its_base_on_the_hub_or_is_refused(lora, base):
    assert json.loads((lora / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        base
    )
    with pytest.raises(PublishError, match=r"base_model_name_or_path.*local path.*--base-model"):
        Publication.of(lora).additions()
    found = Publication.of(lora, "you/model", BASE)
    card = as_bytes(found.files["README.md"]).decode()
    assert f"base_model: {BASE}" in card and "you/model" in card
    config = json.loads(as_bytes(found.files["adapter_config.json"]))
    assert config["base_model_name_or_path"] == BASE and len(found.changes) == 1
    with pytest.raises(PublishError, match=r"`base_model` to be an id.*'/some/where'"):
        Publication.of(lora, base_model="/some/where")


def test_the_list_is_frozen_and_what_was_looked_at_is_what_leaves(full):
    """Weights alone are not read into memory."""
    found = Publication.of(full)
    assert [type(each) is bytes for name, each in found.files.items()] == [
        not name.endswith(".safetensors") for name in found.files
    ]
    with pytest.raises(TypeError):
        found.files["notes.txt"] = b""
    before = found.files["config.json"]
    (full / "config.json").write_text('{"a": "/data/secret/x"}')
    (operation,) = (op for op in found.additions() if op.path_in_repo == "config.json")
    assert operation.path_or_fileobj == before


def test_weights_of_another_run_are_refused(full, trained, tmp_path):
    other = tiny.trainer(tmp_path / "other", max_steps=1)
    other.train()
    other.save_model()
    shutil.copy(tmp_path / "other" / "model.safetensors", full / "model.safetensors")
    with pytest.raises(
        PublishError, match=rf"of another run, {read_run(tmp_path / 'other').run_id}"
    ):
        Publication.of(full).refuse()


def test_an_older_statement_beside_newer_weights_is_refused_with_and_without_the_ledger(full):
    shutil.copy(full / "checkpoint-2" / "privacy.json", full / "privacy.json")
    with pytest.raises(PublishError, match=r"has not ended, or was killed"):
        Publication.of(full).refuse()
    for name in ("ledger.jsonl", "_ledger_head.json"):
        (full / name).unlink()
    with pytest.raises(PublishError, match=r"model.safetensors"):
        Publication.of(full).refuse()


@pytest.mark.parametrize("purpose", ["release", None])
def test_a_run_that_went_on_is_refused(full, purpose):
    """By a release, or by what weakens the claim."""
    own = read_own(full)
    more = [LedgerEntry(own.plan.event(1), purpose)] if purpose else []
    line = own.next(more, Weaknesses(released=("training_loss",)))
    write_line(full / "ledger.jsonl", own.size, line)
    with pytest.raises(PublishError, match=r"has not ended, or was killed"):
        Publication.of(full).refuse()


def test_weights_that_name_no_run_are_refused(full):
    weights = load_file(full / "model.safetensors")
    save_file(weights, full / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PublishError, match=r"model.safetensors"):
        Publication.of(full).refuse()


@pytest.mark.parametrize(("text", "why"), [(None, "is missing"), ("{", "is not complete JSON")])
def test_a_folder_without_its_evidence_is_refused(full, text, why):
    (full / "privacy.json").unlink()
    if text:
        (full / "privacy.json").write_text(text)
    for not_private in (False, True):
        with pytest.raises(PublishError, match=f"privacy.json {why}"):
            Publication.of(full, not_private=not_private).refuse()


def test_a_folder_without_weights_is_refused(full):
    (full / "model.safetensors").rename(full / "pytorch_model.bin")
    with pytest.raises(PublishError, match=r"holds no model.safetensors"):
        Publication.of(full).refuse()
    with pytest.raises(PublishError, match=r"Expected a folder.*nowhere"):
        Publication.of(full / "nowhere")


def test_all_refusals_are_said_at_once(lora):
    (lora / "chat_template.jinja").write_text(str(lora))
    (lora / "LICENSE").write_text("hf_" + "q" * 34)
    assert len(Publication.of(lora).refusals) == 3
    with pytest.raises(PublishError, match=r"(?s)chat_template.*adapter_config|LICENSE"):
        Publication.of(lora).refuse()


# -- what is not private --


@pytest.fixture(scope="module")
def insecure(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("insecure")
    trainer = tiny.trainer(folder, insecure_seed=1, max_steps=1)
    trainer.train()
    trainer.save_model()
    return folder


def test_an_insecure_run_goes_only_as_not_private(insecure):
    with pytest.raises(PublishError, match=r"NOT private.*insecure_seed.*--not-private"):
        Publication.of(insecure).refuse()
    found = Publication.of(insecure, not_private=True)
    found.refuse()
    card = as_bytes(found.files["README.md"]).decode()
    assert "not private" in card.lower() and "epsilon: null" in card
    assert found.in_words() == "not private"


def written(found: Publication, folder: Path) -> Path:
    folder.mkdir()
    for name, content in found.files.items():
        (folder / name).write_bytes(as_bytes(content))
    return folder


# -- weights that nothing ties to the ledger --


def test_weights_that_were_put_beside_a_run_are_refused(lora):
    save_file({"w": torch.zeros(2)}, lora / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PublishError, match=r"nothing vouches for model.safetensors"):
        Publication.of(lora, base_model=BASE).refuse()


def test_a_loop_of_ones_own_is_published_once_its_weights_are_saved(tmp_path):
    trainer = tiny.trainer(tmp_path / "run", max_steps=1)
    trainer.train()
    folder = tmp_path / "run"
    trainer.model.save_pretrained(folder)  # as a plain loop does
    with pytest.raises(PublishError, match=r"nothing vouches for(.|\n)*save_run\(mechanism\)"):
        Publication.of(folder).refuse()
    save_run(trainer.mechanism)
    Publication.of(folder).refuse()


def test_a_run_without_a_private_step_is_refused(tmp_path):
    """Weights that came from elsewhere would be published with epsilon 0."""
    trainer = tiny.trainer(tmp_path / "run")
    trainer.save_model()
    with pytest.raises(PublishError, match="has made no private step"):
        Publication.of(tmp_path / "run").refuse()


def test_weights_of_a_private_run_without_its_record_are_not_saved_as_untrained(tmp_path, trained):
    """As they come from the Hub, whose cache holds weights and configuration alone."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("model.safetensors", "config.json"):
        shutil.copy(trained("full") / name, source / name)
    model = tiny.BertForSequenceClassification.from_pretrained(source)
    trainer = tiny.trainer(tmp_path / "run", given={"model": model})
    with pytest.raises(UnsupportedModelError, match="was trained by the private run"):
        trainer.save_model()


def test_weights_that_change_under_a_publication_are_not_sent(trained, tmp_path):
    folder = shutil.copytree(trained("full"), tmp_path / "run")
    found = Publication.of(folder)
    found.additions()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"evil")
    with pytest.raises(PublishError, match="model.safetensors changed while it was published"):
        found.additions()


def test_a_saved_file_that_is_gone_is_missed(trained, tmp_path):
    folder = shutil.copytree(trained("full"), tmp_path / "run")
    (folder / "config.json").unlink()
    with pytest.raises(PublishError, match="config.json was saved with privacy.json and is not"):
        Publication.of(folder).refuse()


def test_what_goes_verifies_with_its_own_configuration(trained, tmp_path):
    """The base of an adapter is written into the configuration that goes, and digested so."""
    found = Publication.of(trained("lora"), "you/model", BASE)
    assert any("adapter_config.json" in change for change in found.changes)
    there = written(found, tmp_path / "there")
    assert verify(there).outcome == "ok"
    config = json.loads((there / "adapter_config.json").read_text())
    (there / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 999}))
    assert verify(there).outcome == "FAILED"


def test_the_base_that_the_card_names_is_that_of_the_adapter(trained, tmp_path):
    folder = shutil.copytree(trained("lora"), tmp_path / "run")
    assert main(["card", str(folder), "--base-model", BASE]) == 0
    found = Publication.of(folder, "you/model")
    assert found.refusals == ()
    config = json.loads(as_bytes(found.files["adapter_config.json"]))
    assert config["base_model_name_or_path"] == BASE
