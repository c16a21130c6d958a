"""Language models and tables small enough for tests of writing: no download."""

import runpy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from hf_dp.tasks.generation.arguments import demo_tables

RECIPE = Path(__file__).parents[1] / "recipes/pretraining/fresh_gpt2.py"
fresh_gpt2 = runpy.run_path(str(RECIPE))["fresh_gpt2"]


@cache
def tables(count: int = 60) -> Any:
    return demo_tables(count, 12)


@cache
def _shape() -> tuple[Any, Any]:
    rows = demo_tables(300, 1)["train"]
    texts = [text for row in rows for text in row.values()]
    return fresh_gpt2(texts, vocabulary=400, layers=2, width=16, heads=2, positions=160)


def tokenizer() -> Any:
    return _shape()[1]


def gpt2(seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = type(_shape()[0]).from_dict(_shape()[0].to_dict())
    return GPT2LMHeadModel(config).eval()


def t5(seed: int = 0) -> T5ForConditionalGeneration:
    torch.manual_seed(seed)
    words = tokenizer()
    end = words.eos_token_id
    config = T5Config(
        vocab_size=len(words), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        pad_token_id=end, eos_token_id=end, decoder_start_token_id=end,
    )  # fmt: skip
    made = T5ForConditionalGeneration(config).eval()
    with torch.no_grad():  # or a random T5 writes the same whatever it reads
        for weights in made.encoder.parameters():
            weights.mul_(4)
        for layer in made.decoder.block:
            layer.layer[1].EncDecAttention.o.weight.mul_(8)
    return made


def saved(folder: Path, model: Any) -> str:
    """Return a folder with the model and its tokenizer."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)
