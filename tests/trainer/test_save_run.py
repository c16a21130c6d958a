"""A loop of one's own saves by one call what DPTrainer saves: weights, tokenizer, card, evidence."""

from pathlib import Path

import pytest
import tiny
import torch
from loops import plan, run, steps
from peft import LoraConfig, get_peft_model

from hf_dp import mechanism_for, save_run
from hf_dp.cards.verify import verify
from hf_dp.errors import InvalidArgumentError
from hf_dp.publishing.publication import Publication
from hf_dp.trainer import publishing as module


def trained(folder: Path, model: torch.nn.Module, **given):
    mechanism = mechanism_for(run(folder, plan(max_steps=1), model=model, **given))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in steps(mechanism):
        optimizer.step()
    return mechanism


def test_a_model_is_saved_as_it_can_be_verified_loaded_and_published(tmp_path):
    mechanism = trained(tmp_path, tiny.model(), processing_class=tiny.tokenizer())
    metrics = {"eval_accuracy": 0.75}
    statement = save_run(mechanism, metrics=metrics, license="mit", dataset="org/reviews")
    assert verify(tmp_path).outcome == "ok"
    card = (tmp_path / "README.md").read_text()
    assert statement.sentence() in card and "org/reviews" in card and "0.75" in card
    assert "license: mit" in card and "text-classification" in card
    again = type(mechanism.run.model).from_pretrained(tmp_path)
    for name, value in mechanism.run.model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    assert "tokenizer_config.json" in Publication.of(tmp_path).files
    Publication.of(tmp_path).refuse()


def test_an_adapter_is_saved_without_its_base_and_what_a_card_cannot_say_refused(tmp_path):
    lora = LoraConfig(task_type="SEQ_CLS", target_modules=["query"], r=2)
    save_run(trained(tmp_path, get_peft_model(tiny.model(), lora)), tiny.tokenizer())
    assert verify(tmp_path).outcome == "ok"
    assert (tmp_path / "adapter_model.safetensors").exists()
    assert (tmp_path / "tokenizer_config.json").exists()
    assert not (tmp_path / "model.safetensors").exists()
    mechanism = trained(tmp_path / "refused", tiny.model())
    with pytest.raises(InvalidArgumentError, match="A card has no 'licence'"):
        save_run(mechanism, licence="mit")
    assert not (tmp_path / "refused" / "model.safetensors").exists()


def test_planted_weights_that_are_saved_after_the_evidence_are_seen(tmp_path, monkeypatch):
    mechanism = trained(tmp_path, tiny.model())
    write = module.write_card

    def then_the_weights(folder, *others):
        write(folder, *others)
        mechanism.run.model.save_pretrained(folder)

    monkeypatch.setattr(module, "write_card", then_the_weights)
    save_run(mechanism)
    assert verify(tmp_path).outcome != "ok"
