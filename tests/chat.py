"""A tokenizer with a chat template, a tiny model of Qwen's kind, and words to say: no download."""

from functools import cache
from typing import Any

import families
import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl.chat_template_utils import qwen2_5_chat_template


@cache
def _pieces() -> Any:
    return families._bytes(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])


def tokenizer(template: str | None = qwen2_5_chat_template) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(
        tokenizer_object=_pieces(), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    made.chat_template = template
    return made


def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
        attention_dropout=0.0,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


WORDS = "film plot great dull long short good bad fine poor".split()


def words(index: int, count: int) -> str:
    return " ".join(WORDS[(index * 3 + j * (1 + index % 4)) % len(WORDS)] for j in range(count))
