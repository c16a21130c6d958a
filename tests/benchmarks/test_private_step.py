"""Speed and memory of private steps on made-up tokens, for every kind of task."""

from __future__ import annotations

import pytest
import tiny
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_dp.benchmarks.private_step import measure_step
from hf_dp.errors import InvalidArgumentError

BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40}
MODELS = {
    "classification": tiny.model,
    "masked": lambda: BertForMaskedLM(BertConfig(**BERT, intermediate_size=16)),
    "causal": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    ),
    "seq2seq": lambda: T5ForConditionalGeneration(
        T5Config(
            vocab_size=40,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
        )
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_task_is_measured(kind):
    torch.manual_seed(0)
    model = MODELS[kind]()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    cost = measure_step(model, 3, 8, repeats=1)
    assert cost.throughput > 0 and cost.bytes >= 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"batch_size": 0}, "batch_size"), ({"length": 1}, "length"), ({"repeats": 0}, "repeats")],
)
def test_bad_input(wrong, named):
    with pytest.raises(InvalidArgumentError, match=f"`{named}`"):
        measure_step(tiny.model(), **{"batch_size": 2, "length": 4, **wrong})
