"""What a folder would publish: of whole models and adapters, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import tiny
from loopback_hub import BASE
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from hf_dp import save_run
from hf_dp.accounting import LedgerEntry
from hf_dp.cards.verify import verify
from hf_dp.cli.main import main
from hf_dp.errors import PublishError, UnsupportedModelError
from hf_dp.publishing import publication
from hf_dp.publishing.hub import publish
from hf_dp.publishing.publication import Publication
from hf_dp.run.ledger_file import read_own, write_line
from hf_dp.run.witnesses import put_head
from hf_dp.statement.durable import Head
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
    assert found.evidence is not None
    assert found.evidence.ledger.steps("training") == (2 if checkpoint else 4)
    for name, content in found.files.items():
        assert str(trained(method)).encode() not in as_bytes(content), name


def as_bytes(content: bytes | Path) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()


def base_in(config: bytes | Path) -> str:
    return json.loads(as_bytes(config))["base_model_name_or_path"]


def test_an_adapter_names_its_base_on_the_hub_or_is_refused(lora, base):
    assert base_in(lora / "adapter_config.json") == str(base)
    with pytest.raises(PublishError, match=r"base_model_name_or_path.*local path.*--base-model"):
        Publication.of(lora).additions()
    found = Publication.of(lora, "you/model", BASE)
    card = as_bytes(found.files["README.md"]).decode()
    assert f"base_model: {BASE}" in card and "you/model" in card
    assert base_in(found.files["adapter_config.json"]) == BASE and len(found.changes) == 1
    with pytest.raises(PublishError, match=r"`base_model` to be an id.*'/some/where'"):
        Publication.of(lora, base_model="/some/where")


def test_an_adapter_whose_base_has_no_name_says_so_and_its_merged_model_goes(tmp_path):
    lora = LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    trainer = tiny.trainer(tmp_path / "run", given={"peft_config": lora}, max_steps=1)
    tiny.trained(trainer).save_model()
    card = (tmp_path / "run" / "README.md").read_text()
    assert "| Base model | it has no name, so nobody can load the adapter |" in card
    assert "# The base: it has no name" in card and "from_pretrained" not in card
    with pytest.raises(PublishError, match=r"adapter_config.json: .* so nobody can load"):
        Publication.of(tmp_path / "run").refuse()
    found = Publication.of(tmp_path / "run", base_model=BASE)
    card = as_bytes(found.files["README.md"]).decode()
    assert found.refusals == () and f"from_pretrained('{BASE}'" in card and "not named" not in card
    trainer.model = trainer.model.merge_and_unload()  # what the refusal says
    trainer.save_model(str(tmp_path / "merged"))
    found = Publication.of(tmp_path / "merged")
    assert found.refusals == () and "pipeline(" in as_bytes(found.files["README.md"]).decode()
    assert set(found.files) == CARD_AND_TOKENIZER | {"model.safetensors", "config.json"}


def test_the_list_is_frozen_and_what_was_looked_at_is_what_leaves(full):
    """Weights alone are not read into memory."""
    found = Publication.of(full)
    for name, each in found.files.items():
        assert isinstance(each, bytes) != name.endswith(".safetensors"), name
    with pytest.raises(TypeError):
        found.files["notes.txt"] = b""
    before = found.files["config.json"]
    (full / "config.json").write_text('{"a": "/data/secret/x"}')
    (operation,) = (op for op in found.additions() if op.path_in_repo == "config.json")
    assert operation.path_or_fileobj == before


def resaved(folder: Path, head: Head | None = None) -> None:
    """Save the weights again, by another program or by another run."""
    path = folder / "model.safetensors"
    save_file(load_file(path), path, metadata={"format": "pt"})
    if head is not None:
        put_head(path, head)


def without_ledger(folder: Path) -> None:
    shutil.copy(folder / "checkpoint-2" / "privacy.json", folder / "privacy.json")
    for name in ("ledger.jsonl", "_ledger_head.json"):
        (folder / name).unlink()


def goes_on(folder: Path, purpose: str | None) -> None:
    """Record a release, or what weakens the claim."""
    own = read_own(folder)
    more = [LedgerEntry(own.plan.event(1), purpose)] if purpose else []
    line = own.next(more, Weaknesses(released=("training_loss",)))
    write_line(folder / "ledger.jsonl", own.size, line)


KILLED = "has not ended, or was killed"
CHANGES = {
    "weights of another run": (lambda f: resaved(f, Head("another")), "of another run, another"),
    "weights that name no run": (resaved, "model.safetensors is not what was saved"),
    "foreign weights": (
        lambda f: shutil.copy(f / "model.safetensors", f / "adapter_model.safetensors"),
        "nothing vouches for adapter_model.safetensors",
    ),
    "no weights": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "holds no model.safetensors",
    ),
    "a file that is gone": (
        lambda f: (f / "config.json").unlink(),
        "config.json was saved with privacy.json but is not",
    ),
    "an older statement": (
        lambda f: shutil.copy(f / "checkpoint-2" / "privacy.json", f / "privacy.json"),
        KILLED,
    ),
    "an older statement alone": (without_ledger, "model.safetensors was saved later"),
    "another release": (lambda f: goes_on(f, "release"), KILLED),
    "another weakness": (lambda f: goes_on(f, None), KILLED),
    "no evidence": (lambda f: (f / "privacy.json").unlink(), "privacy.json is missing"),
    "half of it": (lambda f: (f / "privacy.json").write_text("{"), "is not complete JSON"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_does_not_belong_together_is_refused(full, kind, tmp_path):
    change, why = CHANGES[kind]
    change(full)
    for not_private in (False, True):
        with pytest.raises(PublishError, match=why):
            Publication.of(full, not_private=not_private).refuse()
        with pytest.raises(PublishError, match=why):
            publish(full, to_folder=tmp_path / "there", not_private=not_private)
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("where", ["not empty", "full/inside", "full", "file"])
def test_a_folder_that_is_not_new_is_refused(full, tmp_path, where):
    (tmp_path / "not empty").mkdir()
    (tmp_path / "not empty" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    why = "Copying" if where == "file" else "`to_folder` to be a new or empty folder outside"
    for folder in (full, full / "checkpoint-2"):
        with pytest.raises(PublishError, match=f"{why}.*/{where}'"):
            publish(folder, to_folder=tmp_path / where)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


def test_an_empty_folder_is_filled_by_the_list_of_a_commit(full, tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    found = Publication.of(full)
    object.__setattr__(found, "files", {**found.files, "trainer_state.json": b"{}"})
    with pytest.raises(PublishError, match="'trainer_state.json' was about to be uploaded"):
        found.write(there)
    assert not any(there.iterdir())
    assert publish(full, to_folder=str(there)) == there
    assert {path.name for path in there.iterdir()} == set(Publication.of(full).files)


@pytest.mark.parametrize("error", [OSError("No space left"), None])
def test_what_changes_or_fails_while_it_is_copied_leaves_nothing(
    full, tmp_path, monkeypatch, error
):
    def copied(content, file):
        file.write(content.read() + b" ")
        if error is not None:
            raise error

    monkeypatch.setattr(publication.shutil, "copyfileobj", copied)
    said = "changed while it was published" if error is None else "No space left.*Publish again"
    with pytest.raises(PublishError, match=said):
        publish(full, to_folder=tmp_path / "there")
    assert not any((tmp_path / "there").iterdir())


def test_all_refusals_are_said_at_once(lora):
    (lora / "chat_template.jinja").write_text(str(lora))
    (lora / "LICENSE").write_text("hf_" + "q" * 34)
    assert len(Publication.of(lora).refusals) == 3
    with pytest.raises(PublishError, match=r"(?s)chat_template.*adapter_config|LICENSE"):
        Publication.of(lora).refuse()


# -- what is not private --


def test_an_insecure_run_goes_only_as_not_private(tmp_path):
    tiny.trained(tiny.trainer(tmp_path, insecure_seed=1, max_steps=1)).save_model()
    with pytest.raises(PublishError, match=r"NOT private.*insecure_seed.*--not-private"):
        Publication.of(tmp_path).refuse()
    found = Publication.of(tmp_path, not_private=True)
    found.refuse()
    card = as_bytes(found.files["README.md"]).decode()
    assert "not private" in card.lower() and "epsilon: null" in card
    assert found.in_words() == "not private"


def test_a_loop_of_ones_own_is_published_once_its_weights_are_saved(tmp_path):
    folder = tmp_path / "run"
    trainer = tiny.trained(tiny.trainer(folder, max_steps=1))
    trainer.model.save_pretrained(folder)  # as a plain loop does
    with pytest.raises(PublishError, match=r"nothing vouches for(.|\n)*save_run\(mechanism\)"):
        Publication.of(folder).refuse()
    save_run(trainer.mechanism)
    Publication.of(folder).refuse()


def test_a_run_without_a_private_step_is_refused(tmp_path):
    """Weights that came from elsewhere would be published with epsilon 0."""
    tiny.trainer(tmp_path / "run").save_model()
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


def test_weights_that_change_under_a_publication_are_not_sent(full):
    found = Publication.of(full)
    found.additions()
    weights = full / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"evil")
    with pytest.raises(PublishError, match="model.safetensors changed while it was published"):
        found.additions()
    with pytest.raises(PublishError, match="model.safetensors changed while it was published"):
        found.write(full.parent / "there")


def test_what_goes_verifies_with_its_own_configuration(trained, tmp_path):
    """The base of an adapter is written into the configuration that goes, and digested so."""
    found = Publication.of(trained("lora"), "you/model", BASE)
    assert any("adapter_config.json" in change for change in found.changes)
    for name, content in found.files.items():
        (tmp_path / name).write_bytes(as_bytes(content))
    assert verify(tmp_path).outcome == "ok"
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 999}))
    assert verify(tmp_path).outcome == "FAILED"


def test_the_base_that_the_card_names_is_that_of_the_adapter(lora):
    assert main(["card", str(lora), "--base-model", BASE]) == 0
    found = Publication.of(lora, "you/model")
    assert found.refusals == ()
    assert base_in(found.files["adapter_config.json"]) == BASE
