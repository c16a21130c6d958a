"""What stands inside the files that go: paths taken out, secrets refused, the rest left alone."""

import json
from pathlib import Path

import pytest
import torch
from loopback_hub import TOKEN
from safetensors.torch import save_file

from hf_dp.publishing.scan import Scan, scrubbed

PLACES = ["/srv/people/alicia", "/srv/people/alicia/runs/one"]


def scan(base_model: str | None = None) -> Scan:
    made = Scan(Path(PLACES[1]), base_model, [TOKEN])
    made.places, made.user, made.machine = PLACES, "alicia", "wonderland7"
    return made


def looked_at(name: str, values, base_model: str | None = None) -> tuple[bytes, Scan]:
    contents = scan(base_model)
    text = values if isinstance(values, bytes) else json.dumps(values).encode()
    return contents.published(name, text), contents


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("a", "/data/secret/rows.csv", "a local path"),
        ("a", "~/rows.csv", "a local path"),
        ("a", "~bob/rows.csv", "a local path"),
        ("a", "C:\\rows\\a.csv", "a local path"),
        ("a", "\\\\server\\share", "a local path"),
        ("a", "file:///rows.csv", "an address"),
        ("a", "/tmp", "a local path"),
        ("a", "trained on /data/rows/a.csv", "a local path"),
        ("a", "see /srv/people/alicia", "the folder /srv/people/alicia"),
        ("a", "copies/alicia/rows", "the user's name in a path"),
        ("a", "ran on wonderland7", "the name of this machine"),
        ("a", "http://wonderland7:8080/model", "the name of this machine"),
        ("a", "file:///data/rows.csv", "an address"),
        ("a", "rows: file:///data/rows.csv", "an address"),
        ("a", "s3://bucket/rows.csv", "an address"),
        ("a", "http://user:password@host/x", "an address"),
        ("a", "from;/data/rows.csv", "a local path"),
        ("a", "x>/data/rows.csv", "a local path"),
        ("a", "from C:\\Users\\me\\rows.csv", "a local path"),
        ("a", TOKEN, "a token of the Hub"),
        ("a", "hf_" + "x" * 34, "a token of the Hub"),
        ("b", ["x", {"c": "/data/secret/rows.csv"}], "a local path"),
        ("/data/rows/a.csv", 1, "a local path"),
        ("chat_template", f"{{{{ '{PLACES[0]}' }}}}", "the folder"),
    ],
)
def test_what_is_private_is_refused_by_file_and_key(key, value, what):
    _, contents = looked_at("config.json", {"model_type": "bert", key: value})
    (refusal,) = contents.refusals
    assert refusal.startswith("config.json") and what in refusal
    assert TOKEN not in refusal
    if "token" not in what:
        assert f"config.json: {key}" in refusal


@pytest.mark.parametrize(
    "values",
    [
        {"a": "alicia/model", "b": "org/alicia", "c": "https://hub.co/alicia/model/x"},
        {"id2label": {"0": "yes/no", "1": "/", "2": "a / b"}, "x": "</think>", "y": "/think"},
        {"chat_template": "{% if x %}\n /no_think /usr/share/x {% endif %}"},
        {"chat_template": [{"name": "tool", "template": "/usr/share/x"}]},
        {"text": "see [it](https://hub.co/alicia/model) and http://x.org/data/rows/a.csv"},
        {"version": "5.23.0", "big": 1e9, "none": None, "words": "wonderland70 wonder"},
    ],
)
def test_what_is_not_private_leaves_as_it_is(values):
    text = json.dumps(values, indent=3).encode()
    published, contents = looked_at("tokenizer_config.json", text)
    assert published == text and contents.refusals == contents.changes == []


def test_a_machine_whose_name_is_a_models_is_not_looked_for(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "bert")
    made = Scan(Path(PLACES[1]), None, [])
    made.published("config.json", json.dumps({"model_type": "bert"}).encode())
    assert not made.refusals


def test_a_vocabulary_may_hold_any_word_but_a_token():
    vocabulary = {"model": {"vocab": {"/usr/local/bin": 1, "wonderland7": 2}}}
    assert looked_at("tokenizer.json", vocabulary)[1].refusals == []
    vocabulary["model"]["vocab"][TOKEN] = 3
    assert "a token" in looked_at("tokenizer.json", vocabulary)[1].refusals[0]


@pytest.mark.parametrize("name", ["README.md", "chat_template.jinja", "LICENSE", "merges.txt"])
def test_no_text_leaves_with_a_token(name):
    assert "a token" in looked_at(name, f"x {TOKEN} y".encode())[1].refusals[0]


def test_a_card_does_not_name_the_folder_or_the_home():
    assert looked_at("README.md", b"see /usr/share/doc and alicia/model")[1].refusals == []
    for place in PLACES:
        assert looked_at("README.md", f"in {place}/x".encode())[1].refusals


def test_paths_from_which_a_file_came_are_left_out(tmp_path):
    values = {
        "_name_or_path": str(tmp_path),
        "text_config": {"_name_or_path": "../up/there/x", "hidden": 1},
        "name_or_path": "bert-base-uncased",
        "model_type": "bert",
    }
    published, contents = looked_at("config.json", values)
    kept = {"text_config": {"hidden": 1}, "name_or_path": "bert-base-uncased", "model_type": "bert"}
    assert json.loads(published) == kept
    assert contents.refusals == [] and len(contents.changes) == 2
    values = {"tokenizer_file": "/data/x/tokenizer.json", "name_or_path": "/data/x", "pad": "[P]"}
    published, contents = looked_at("tokenizer_config.json", values)
    assert json.loads(published) == {"pad": "[P]"} and contents.refusals == []


@pytest.mark.parametrize(
    "local", ["/data/bases/roberta", "./roberta", "outputs/one/merged", "here"]
)
def test_a_local_base_is_replaced_by_its_id_or_refused(local, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    values = {"base_model_name_or_path": local, "r": 8}
    _, contents = looked_at("adapter_config.json", values)
    (refusal,) = contents.refusals
    assert "base_model_name_or_path" in refusal and "--base-model ID" in refusal
    published, contents = looked_at("adapter_config.json", values, "org/base")
    assert json.loads(published) == {"base_model_name_or_path": "org/base", "r": 8}
    assert contents.refusals == [] and len(contents.changes) == 1


def test_a_base_on_the_hub_stays_and_its_file_is_byte_for_byte_the_same():
    text = json.dumps({"base_model_name_or_path": "FacebookAI/roberta-base"}, indent=5).encode()
    for base_model in (None, "FacebookAI/roberta-base"):
        published, contents = looked_at("adapter_config.json", text, base_model)
        assert published == text and contents.refusals == contents.changes == []


@pytest.mark.parametrize("base", [None, ""])
def test_an_adapter_whose_base_has_no_name_is_given_one_or_refused(base):
    _, contents = looked_at("adapter_config.json", {"base_model_name_or_path": base})
    (refusal,) = contents.refusals
    assert "no name of the adapter's base, so nobody can load" in refusal and "\n" not in refusal
    for move in ("--base-model ID", "save_pretrained", "merge_and_unload"):
        assert move in refusal
    assert looked_at("adapter_config.json", {"base_model_name_or_path": base}, "a/b")[1].changes


def test_json_that_cannot_be_looked_through_is_refused():
    assert looked_at("config.json", b"{")[1].refusals
    twice = b'{"a": "/data/secret/x", "a": 1}'
    assert "twice" in looked_at("config.json", twice)[1].refusals[0]


def test_metadata_of_weights_other_than_their_format_is_refused(tmp_path):
    def refusals(**metadata: str) -> list[str]:
        path = tmp_path / "model.safetensors"
        save_file({"w": torch.zeros(2)}, path, metadata=metadata)
        contents = scan()
        contents.look_at_weights("model.safetensors", path)
        return contents.refusals

    head = json.dumps({"run_id": "a", "lines": 0, "digest": ""})
    assert refusals(format="pt", hf_dp_ledger_head=head) == refusals() == []
    assert refusals(hf_dp_ledger_head="rows.csv")
    (refusal,) = refusals(format="pt", trained_on="rows.csv")
    assert "model.safetensors holds 'trained_on'" in refusal
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    contents = scan()
    contents.look_at_weights("model.safetensors", tmp_path / "model.safetensors")
    assert "safetensors file" in contents.refusals[0]


def test_words_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LOGNAME", "alicia")
    words = Scan(tmp_path / "run" / "checkpoint-2", tokens=["a-token-that-was-passed"])
    assert {TOKEN, "a-token-that-was-passed"} <= set(words.tokens)
    folders = ("run/checkpoint-2", "run", "home")
    assert words.places == [str(tmp_path / folder) for folder in folders]
    assert words.user == "alicia" and words.machine


def test_tokens_are_scrubbed(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "a-token-of-the-environment")
    text = f"a {TOKEN} b a-token-of-the-environment c given d hf_{'y' * 40}"
    assert scrubbed(text, ["given", None]) == "a <token> b <token> c <token> d <token>"
