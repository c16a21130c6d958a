"""Synthetic examples in a model's declared ranges, for the self-check. No private row is involved."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dp.errors import UnsupportedModelError
from hf_dp.losses import IGNORED_LABEL, base_model, task_of

_LENGTHS = (
    7,
    12,
    4,
)  # neither ascending nor descending: a model that sorts its rows must not look like one that does not
_TARGET_LENGTHS = (5, 3, 4)  # of sequence-to-sequence models; the longer text has the shorter target

Batch = dict[str, Tensor]


def synthetic_batches(model: nn.Module, device: torch.device) -> tuple[Batch, list[Batch]]:
    """``(padded, alone)``: three examples, of different length where they have one, as one right-padded batch and one by one.

    Raises: UnsupportedModelError for a model whose inputs are neither token ids nor images.
    """
    base: Any = base_model(model)
    main_input = getattr(base, "main_input_name", None)
    if main_input == "input_ids":
        padded, alone = _texts(model, base)
    elif main_input == "pixel_values":
        padded, alone = _images(base)
    else:
        raise UnsupportedModelError(
            f"{type(base).__name__} takes {main_input!r}, for which hf_dp cannot make synthetic "
            "examples to check the clipping engine with. Override DPTrainer.synthetic_batches(self) to return them."
        )
    return _to(padded, device), [_to(example, device) for example in alone]


def _texts(model: nn.Module, base: Any) -> tuple[Batch, list[Batch]]:
    config, task = base.config, task_of(model)
    pad, eos = (getattr(config, name, None) for name in ("pad_token_id", "eos_token_id"))  # Funnel has no eos
    pad = pad if isinstance(pad, int) else 0
    vocabulary = base.get_input_embeddings().weight.shape[0]
    tokens = torch.tensor([token for token in range(vocabulary) if token != pad])
    has_mask = "attention_mask" in inspect.signature(base.forward).parameters
    alone = []
    for length, target_length in zip(_LENGTHS, _TARGET_LENGTHS, strict=True):
        ids = tokens[torch.randint(len(tokens), (1, length))]
        if valid := getattr(base, "valid_input_ids", None):
            ids = valid(ids)
        if isinstance(eos, int) and 0 <= eos < vocabulary:
            ids[:, :-1][ids[:, :-1] == eos] = ids[0, 0] if ids[0, 0] != eos else tokens[0]
            ids[:, -1] = eos  # some heads read the position of it
        if task == "seq2seq_lm":
            labels = tokens[torch.randint(len(tokens), (1, target_length))]
        else:
            labels = _labels(base, task, ids)
        example = {"input_ids": ids, "labels": labels}
        if has_mask:
            example["attention_mask"] = torch.ones_like(ids)
        alone.append(example)
    fill = {"input_ids": pad, "labels": IGNORED_LABEL, "attention_mask": 0}
    padded = {}
    for name in alone[0]:
        values = [example[name] for example in alone]
        if name != "labels" or task in ("causal_lm", "masked_lm", "token_classification", "seq2seq_lm"):
            longest = max(value.shape[1] for value in values)
            values = [F.pad(value, (0, longest - value.shape[1]), value=fill[name]) for value in values]
        padded[name] = torch.cat(values)
    return padded, alone


def _images(base: Any) -> tuple[Batch, list[Batch]]:
    size = base.config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    alone = [
        {
            "pixel_values": torch.randn(1, base.config.num_channels, height, width, dtype=base.dtype),
            "labels": _labels(base, "image_classification", None),
        }
        for _ in _LENGTHS
    ]
    return {name: torch.cat([example[name] for example in alone]) for name in alone[0]}, alone


def _labels(model: Any, task: str, ids: Tensor | None) -> Tensor:
    config = model.config
    if task in ("causal_lm", "masked_lm"):
        assert ids is not None
        return ids.clone()
    if task == "token_classification":
        assert ids is not None
        return torch.randint(config.num_labels, ids.shape)
    if config.problem_type == "multi_label_classification":
        return torch.randint(2, (1, config.num_labels)).float()
    if config.problem_type == "regression" or config.num_labels == 1:
        values = torch.randn(1, config.num_labels)
        return values.squeeze(-1) if config.num_labels == 1 else values
    return torch.randint(config.num_labels, (1,))


def _to(batch: Batch, device: torch.device) -> Batch:
    return {name: value.to(device) for name, value in batch.items()}
