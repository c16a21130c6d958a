"""The allow-list: by name, unknown stays, links do not lead out."""

import json
from pathlib import Path

import pytest

from hf_dp.errors import PublishError
from hf_dp.publishing.allowed import LINK, UNKNOWN, refuse_others, sort_files, why_goes, why_stays

GO = """
model.safetensors model-00001-of-00002.safetensors model.safetensors.index.json
adapter_model.safetensors adapter_config.json config.json generation_config.json
tokenizer.json tokenizer_config.json tokenizer.model vocab.txt vocab.json merges.txt spiece.model
sentencepiece.bpe.model source.spm special_tokens_map.json added_tokens.json chat_template.jinja
additional_chat_templates/tool_use.jinja preprocessor_config.json processor_config.json
video_preprocessor_config.json selection.json selection_masks.safetensors README.md privacy.json
LICENSE LICENSE.txt NOTICE
""".split()
STAY = """
optimizer.pt optimizer.bin scheduler.pt scaler.pt rng_state.pth rng_state_0.pth training_args.bin
trainer_state.json all_results.json eval_results.json train_results.json pytorch_model.bin
adapter_model.bin model.pt model.ckpt modeling_mine.py _ledger_head.json _ledger_copy.jsonl ledger.jsonl
_earlier-run-1/privacy.json _publishing-x1/model.safetensors
checkpoint-2/model.safetensors runs/Nov/events.out.tfevents.1.host.2 events.out.tfevents.1.host.2
training.log logs/out.txt
""".split()
UNKNOWNS = """
predictions.jsonl train.csv model.safetensors.bak MODEL.safetensors other.safetensors
readme.md privacy.json.old privacy.json.sig config.json~ my_config.json adapter/adapter_config.json
additional_chat_templates/x.py additional_chat_templates/a/b.jinja data/config.json .gitattributes
model.safetensors\n tokenizer.json/x confidential
""".split(" ")


@pytest.mark.parametrize("name", GO)
def test_what_loading_and_checking_need_goes(name):
    assert why_goes(name)


@pytest.mark.parametrize("name", STAY)
def test_what_is_known_to_tell_more_stays_and_why_is_said(name):
    assert why_goes(name) is None and why_stays(name) != UNKNOWN


@pytest.mark.parametrize("name", [name.strip(" ") for name in UNKNOWNS if name.strip()])
def test_the_unknown_stays(name):
    assert why_goes(name) is None


def test_a_folder_is_sorted(tmp_path):
    wanted = {"model.safetensors", "additional_chat_templates/tools.jinja"}
    others = {"notes.txt", "additional_chat_templates/tools.py"}
    inside = {"runs/a/events.out.tfevents.1", "checkpoint-2/model.safetensors", "data/config.json"}
    for name in wanted | others | inside:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    goes, stays = sort_files(tmp_path)
    assert set(goes) == wanted and set(stays) == others | {"runs/", "checkpoint-2/", "data/"}
    assert "logs" in stays["runs/"] and "checkpoint" in stays["checkpoint-2/"]


def test_links_stay(tmp_path):
    """Also one inside the folder: it may lead to a file that must stay."""
    run, outside = tmp_path / "run", tmp_path / "secret.json"
    run.mkdir()
    outside.write_text("{}")
    (run / "config.json").symlink_to(outside)
    (run / "real.txt").write_text("")
    (run / "LICENSE").symlink_to(run / "real.txt")
    (run / "additional_chat_templates").symlink_to(tmp_path)
    goes, stays = sort_files(run)
    assert stays["config.json"] == stays["LICENSE"] == LINK
    assert not goes


def test_a_shard_that_the_index_does_not_name_stays(tmp_path):
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name in shards:
        (tmp_path / name).write_text("")
    index = json.dumps({"weight_map": {"w": shards[0]}})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    goes, stays = sort_files(tmp_path)
    assert shards[0] in goes and "earlier save" in stays[shards[1]]


def test_the_last_look_refuses_what_is_not_on_the_list():
    refuse_others(["model.safetensors", "README.md"])
    said = r"'trainer_state.json'.*log of the training.*Nothing was"
    with pytest.raises(PublishError, match=said):
        refuse_others(["model.safetensors", "trainer_state.json"])


def test_every_file_that_transformers_and_peft_write_is_known(trained: object, full: Path):
    """No file of a run is of a name that nobody thought of."""
    for folder in (full, full / "checkpoint-2"):
        assert UNKNOWN not in sort_files(folder)[1].values()
