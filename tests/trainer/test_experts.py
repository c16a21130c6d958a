"""Mixtures of experts, through a trainer."""

import pytest
import tiny
import torch
from models import llama, olmoe, qwen3_moe
from transformers import DataCollatorForLanguageModeling

from hf_dp.cards.verify import verify
from hf_dp.clipping.rules.experts import Routed
from hf_dp.errors import SelfCheckError

LIMIT = "Experts chosen by rounding"


def trainer(folder, build):
    model = build(dtype=torch.float32)
    collator = DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False)
    rows = [{"input_ids": [4 + (i + t) % 8 for t in range(3 + i % 5)]} for i in range(40)]
    given = {"model": model, "train_dataset": rows, "eval_dataset": None, "data_collator": collator}
    return tiny.trainer(folder, given=given, max_steps=1)


@pytest.mark.parametrize("build", [olmoe, qwen3_moe, llama])
def test_the_card_names_the_limit_of_what_chooses_experts(build, tmp_path):
    made = trainer(tmp_path, build)
    before = tiny.weights(made.model)
    made.train()
    assert {name for name in before if "experts" in name} <= tiny.moved(before, made.model)
    made.save_model()
    assert (LIMIT in (tmp_path / "README.md").read_text()) == (build is not llama)
    assert verify(tmp_path).outcome == "ok"


def test_planted_tokens_of_a_neighbor_are_seen_before_the_first_draw(tmp_path, monkeypatch):
    honest = Routed.norms

    def planted(self, grams=None):
        self.places = self.places // self.examples * self.examples
        return honest(self, grams)

    monkeypatch.setattr(Routed, "norms", planted)
    made = trainer(tmp_path, olmoe)
    with pytest.raises(SelfCheckError, match="gradient norm"):
        made.train()
    assert made.ledger.steps() == 0
