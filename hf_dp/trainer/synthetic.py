"""Two synthetic examples in a model's declared ranges, for the self-check. No private row is involved."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dp.errors import UnsupportedModelError
from hf_dp.losses import IGNORED_LABEL, base_model, task_of

_LENGTHS = (7, 12)


def synthetic_batches(model: nn.Module, device: torch.device) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """``(padded, alone)``: two examples of different length as one right-padded batch, and each as a batch of one.

    Raises: UnsupportedModelError for a model whose inputs are not token ids.
    """
    base: Any = base_model(model)
    if getattr(base, "main_input_name", None) != "input_ids":
        raise UnsupportedModelError(
            f"{type(base).__name__} takes {getattr(base, 'main_input_name', None)!r}, for which hf_dp cannot make synthetic "
            "examples to check the clipping engine with. Override DPTrainer.synthetic_batches(self) to return them."
        )
    config = base.config
    pad = config.pad_token_id if isinstance(config.pad_token_id, int) else 0
    vocabulary = base.get_input_embeddings().weight.shape[0]
    tokens = torch.tensor([token for token in range(vocabulary) if token != pad])
    names = inspect.signature(base.forward).parameters
    alone = []
    for length in _LENGTHS:
        ids = tokens[torch.randint(len(tokens), (1, length))]
        if isinstance(config.eos_token_id, int) and 0 <= config.eos_token_id < vocabulary:
            ids[:, -1] = config.eos_token_id  # some heads read the position of it
        example = {"input_ids": ids, "labels": _labels(base, ids)}
        if "attention_mask" in names:
            example["attention_mask"] = torch.ones_like(ids)
        alone.append(example)
    longest = max(_LENGTHS)
    fill = {"input_ids": pad, "labels": IGNORED_LABEL, "attention_mask": 0}
    per_token = {"input_ids", "attention_mask"} | ({"labels"} if task_of(model) == "causal_lm" else set())
    padded = {
        name: torch.cat(
            [
                F.pad(example[name], (0, longest - example[name].shape[1]), value=fill[name])
                if name in per_token
                else example[name]
                for example in alone
            ]
        )
        for name in alone[0]
    }
    return _to(padded, device), [_to(example, device) for example in alone]


def _labels(model: Any, ids: Tensor) -> Tensor:
    if task_of(model) == "causal_lm":
        return ids.clone()
    config = model.config
    if config.problem_type == "multi_label_classification":
        return torch.randint(2, (1, config.num_labels)).float()
    if config.problem_type == "regression" or config.num_labels == 1:
        return (
            torch.randn(1, config.num_labels).squeeze(-1)
            if config.num_labels == 1
            else torch.randn(1, config.num_labels)
        )
    return torch.randint(config.num_labels, (1,))


def _to(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in batch.items()}
