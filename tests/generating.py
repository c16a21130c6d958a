"""Models that generate, rows of prompt and target for them, and what the prompt alone gives."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import tiny
import torch
import transformers as hf
from models import VOCABULARY, gpt2, llama
from torch.nn import functional as F

from hf_dp import DPSeq2SeqTrainer, DPSeq2SeqTrainingArguments

TARGETS = 31  # tokens from here on stand in targets, and below in prompts
NEW = 6
FAMILIES = {"gpt2": gpt2, "llama": llama}


def causal(family: str = "gpt2") -> Any:
    return FAMILIES[family](dtype=torch.float32)


def t5() -> hf.T5ForConditionalGeneration:
    torch.manual_seed(0)
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=3,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def bart() -> hf.BartForConditionalGeneration:
    torch.manual_seed(0)
    config = hf.BartConfig(
        vocab_size=VOCABULARY, d_model=16, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
        decoder_ffn_dim=24, max_position_embeddings=40, dropout=0.0, init_std=0.3,
        decoder_start_token_id=2, forced_eos_token_id=None, pad_token_id=0, bos_token_id=2,
        eos_token_id=3,
    )  # fmt: skip
    return hf.BartForConditionalGeneration(config)


def texts(count: int, seed: int) -> datasets.Dataset:
    """Prompts and targets of unequal lengths, in one row."""
    generator = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        prompt = generator.integers(4, TARGETS, 3 + (5 * index) % 9).tolist()
        target = generator.integers(TARGETS, VOCABULARY, 1 + index % 4).tolist()
        columns = {"input_ids": prompt + target, "labels": [-100] * len(prompt) + target}
        rows.append({**columns, "attention_mask": [1] * len(prompt + target)})
    return datasets.Dataset.from_list(rows)


def pairs(count: int, seed: int) -> datasets.Dataset:
    """The same for an encoder-decoder."""
    rows = []
    for row in texts(count, seed):
        masked = [label == -100 for label in row["labels"]]
        prompt = [token for token, out in zip(row["input_ids"], masked) if out]
        target = [token for token, out in zip(row["input_ids"], masked) if not out]
        rows.append({"input_ids": prompt, "attention_mask": [1] * len(prompt), "labels": target})
    return datasets.Dataset.from_list(rows)


def trainer(
    folder,
    model=None,
    *,
    cls: type = DPSeq2SeqTrainer,
    given: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    model = causal() if model is None else model
    made = pairs if model.config.is_encoder_decoder else texts
    tokenizer = (given or {}).get("processing_class") or tiny.tokenizer()
    keywords = {
        "train_dataset": made(40, 0),
        "eval_dataset": made(6, 1),
        "data_collator": hf.DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100),
        "processing_class": tokenizer,
        "compute_metrics": lambda prediction: {"rows": len(prediction.predictions)},
        **(given or {}),
    }
    values = {
        "per_device_eval_batch_size": 4, "max_steps": 3, "predict_with_generate": True,
        "generation_max_length": NEW, **options,
    }  # fmt: skip
    args = tiny.arguments(folder, DPSeq2SeqTrainingArguments, **values)
    return cls(model=model, args=args, **keywords)


def alone(model: Any, row: dict[str, list[int]], **options: Any) -> list[int]:
    """The greedy answer to the prompt of one row, without padding, padded to NEW."""
    prompt = [t for t, label in zip(row["input_ids"], row["labels"]) if label == -100]
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "pad_token_id": 0}
        found = model.eval().generate(**given, max_new_tokens=NEW, **options)
    return F.pad(found[0, len(prompt) :], (0, NEW - (found.shape[1] - len(prompt)))).tolist()
