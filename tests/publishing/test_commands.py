"""``hf-dp inspect`` and ``hf-dp publish``."""

import json

import pytest
from loopback_hub import BASE, TOKEN, USER

from hf_dp.cli.main import main
from hf_dp.publishing.publication import Publication

NAME = f"{USER}/model"


def test_inspect_lists_what_goes_what_stays_and_why(full, capsys):
    assert main(["inspect", str(full)]) == 0
    said = capsys.readouterr().out
    assert "proven, epsilon" in said and "4 releases" in said
    goes, stays = said.split("stays:")
    assert "model.safetensors" in goes and "noised weights" in goes
    assert "training_args.bin" in stays and "checkpoint-2/" in stays and "REFUSED" not in said


def test_inspect_says_what_is_refused_and_exits_with_1(lora, capsys):
    assert main(["inspect", str(lora)]) == 1
    assert "REFUSED" in (said := capsys.readouterr().out) and "--base-model ID" in said
    assert main(["inspect", str(lora), "--base_model", BASE, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["refusals"] == [] and "adapter_model.safetensors" in found["goes"]
    assert main(["inspect", str(lora / "nowhere")]) == 2
    assert "Expected a folder" in (said := capsys.readouterr().err) and "nowhere" in said


@pytest.mark.parametrize("spelling", ["--base-model", "--base_model"])
def test_publish(hub, lora, capsys, spelling):
    assert main(["publish", str(lora), NAME, "--private", spelling, BASE]) == 0
    assert capsys.readouterr().out.strip() == f"{hub.url}/{NAME}/commit/{hub.pushes(NAME)[0].oid}"
    assert hub.repositories[NAME].private
    config = json.loads(hub.files(NAME)["adapter_config.json"])
    assert config["base_model_name_or_path"] == BASE


def test_the_repository_may_follow_the_options(hub, full, capsys):
    assert main(["publish", str(full), "--private", NAME]) == 0
    assert hub.repositories[NAME].private


@pytest.mark.parametrize("spelling", ["--to-folder", "--to_folder"])
def test_publish_into_a_folder_writes_what_inspect_lists_without_the_hub(
    lora, tmp_path, capsys, monkeypatch, spelling
):
    monkeypatch.setattr("hf_dp.publishing.hub.Hub", None)
    (lora / "additional_chat_templates").mkdir()
    (lora / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    there = tmp_path / "new" / "there"
    assert main(["publish", str(lora), spelling, str(there), "--base-model", BASE]) == 0
    assert capsys.readouterr().out == f"hf-dp verify {there}\n"
    main(["inspect", str(lora), "--base-model", BASE, "--json"])
    goes = json.loads(capsys.readouterr().out)["goes"]
    written = {path.relative_to(there).as_posix(): path for path in there.rglob("*.*")}
    assert written.keys() == goes.keys() and "additional_chat_templates/tool.jinja" in goes
    for name, content in Publication.of(lora, base_model=BASE).files.items():
        found = content if isinstance(content, bytes) else content.read_bytes()
        assert written[name].read_bytes() == found, name
    assert main(["verify", str(there)]) == 0


def test_publish_is_told_one_place(full, capsys):
    for words, why in (
        ([], "Expected `repository` ('you/model') or `to_folder`, got neither"),
        ([NAME, "--to-folder", "x"], f"so these have no effect: {{'repository': '{NAME}'}}"),
        (["--no-private", "--to-folder", "x"], "so these have no effect: {'private': False}"),
        (["--revision", "b", "--to-folder", "x"], "so these have no effect: {'revision': 'b'}"),
    ):
        assert main(["publish", str(full), *words]) == 2
        assert why in capsys.readouterr().err


def test_publish_refuses_in_one_line_without_the_token(hub, lora, capsys):
    hub.faults["commit"] = 403
    assert main(["publish", str(lora), NAME, "--base-model", BASE]) == 2
    said = capsys.readouterr().err
    assert said.startswith("hf-dp publish: ") and "may not write" in said and TOKEN not in said


def test_there_is_no_option_for_a_token(capsys):
    with pytest.raises(SystemExit):
        main(["publish", "--help"])
    said = capsys.readouterr().out
    assert "--token" not in said and "hf auth login" in said and "HF_TOKEN" in said
