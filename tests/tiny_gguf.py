"""A decoder in a GGUF file as llama.cpp writes it, beside what its weights are once dequantized."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import families
import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

FILE = "tiny-instruct.Q8_0.gguf"
END = "<|im_end|>"  # also what pads, as SmolLM2 has it
_SPECIAL = ["<|endoftext|>", "<|im_start|>", END]
_HEADS, _KEY_VALUE_HEADS = 4, 2
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}  # fmt: skip


@cache
def _pieces() -> dict[str, Any]:
    return json.loads(families._bytes(_SPECIAL).to_str())["model"]


def _rotary(weights: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of a query or key projection in the order that llama.cpp rotates them in."""
    halves = weights.reshape(heads, 2, len(weights) // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(weights.shape)


def write(folder: Path, file: str = FILE) -> LlamaForCausalLM:
    """Write the file into a folder. Return the model that it holds, dequantized."""
    pieces = _pieces()
    words = sorted(pieces["vocab"], key=pieces["vocab"].__getitem__)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=_HEADS, num_key_value_heads=_KEY_VALUE_HEADS,
        max_position_embeddings=256, tie_word_embeddings=True, rms_norm_eps=1e-5,
        bos_token_id=words.index(_SPECIAL[1]), eos_token_id=words.index(END),
        pad_token_id=words.index(END), initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    folder.mkdir(parents=True, exist_ok=True)
    to = gguf.GGUFWriter(folder / file, "llama")
    to.add_context_length(config.max_position_embeddings)
    to.add_embedding_length(config.hidden_size)
    to.add_block_count(config.num_hidden_layers)
    to.add_feed_forward_length(config.intermediate_size)
    to.add_head_count(_HEADS)
    to.add_head_count_kv(_KEY_VALUE_HEADS)
    to.add_layer_norm_rms_eps(config.rms_norm_eps)
    to.add_rope_dimension_count(config.hidden_size // _HEADS)
    to.add_rope_freq_base(10000.0)
    to.add_vocab_size(len(words))
    to.add_tokenizer_model("gpt2")
    to.add_token_list(words)
    to.add_token_types([3 if word in _SPECIAL else 1 for word in words])
    to.add_token_merges([" ".join(pair) for pair in pieces["merges"]])
    to.add_bos_token_id(config.bos_token_id)
    to.add_eos_token_id(config.eos_token_id)
    to.add_pad_token_id(config.pad_token_id)
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, weights in model.named_parameters():
        values = weights.detach().numpy()
        short = name
        for ours, theirs in _NAMES.items():
            short = short.replace(ours, theirs)
        if values.ndim == 1:
            to.add_tensor(short, values)
            continue
        packed = gguf.quantize(values, kind)
        weights.data = torch.from_numpy(gguf.dequantize(packed, kind))
        heads = {"attn_q": _HEADS, "attn_k": _KEY_VALUE_HEADS}.get(short.split(".")[-2])
        to.add_tensor(short, packed if heads is None else _rotary(packed, heads), raw_dtype=kind)
    to.write_header_to_file()
    to.write_kv_data_to_file()
    to.write_tensors_to_file()
    to.close()
    return model
