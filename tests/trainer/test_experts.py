"""Mixtures of experts, through a trainer."""

import pytest
import tiny
import torch
from models import llama, olmoe, qwen3_moe
from transformers import DataCollatorForLanguageModeling

from hf_dp.cards.verify import verify
from hf_dp.errors import UnsupportedModelError


@pytest.mark.parametrize("build", [olmoe, qwen3_moe, llama])
def test_the_card_names_the_limit_of_what_chooses_experts(build, tmp_path):
    model = build(dtype=torch.float32)
    collator = DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False)
    rows = [{"input_ids": [4 + (i + t) % 8 for t in range(3 + i % 5)]} for i in range(40)]
    given = {"model": model, "train_dataset": rows, "eval_dataset": None, "data_collator": collator}
    made, before = tiny.trainer(tmp_path, given=given, max_steps=1), tiny.weights(model)
    made.train()
    assert {name for name in before if "experts" in name} <= tiny.moved(before, made.model)
    made.save_model()
    said = "Experts chosen by rounding" in (tmp_path / "README.md").read_text()
    assert said == (build is not llama)
    assert verify(tmp_path).outcome == "ok"


@pytest.mark.usefixtures("unchecked")
def test_scaled_gradients_of_experts_are_refused_before_the_first_draw(tmp_path):
    rows = [{"input_ids": [4 + (i + t) % 8 for t in range(3 + i % 5)]} for i in range(40)]
    collator = DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False)
    given = {"train_dataset": rows, "eval_dataset": None, "data_collator": collator}
    given["model"] = olmoe(dtype=torch.float32)
    made = tiny.trainer(tmp_path, given=given, max_steps=1, gradient_scaling_beta=0.7)
    with pytest.raises(UnsupportedModelError, match=r"experts.*label words of one token"):
        made.train()
    assert len(made.ledger) == 0
