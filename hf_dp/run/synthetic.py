"""Synthetic examples in a model's declared ranges, for the self-check; no private row is used."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_dp.errors import UnsupportedLossError, UnsupportedModelError
from hf_dp.losses import base_model, targets_of, task_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Neither ascending nor descending, so that a model that sorts its examples is found out.
_LENGTHS = (7, 12, 4)
# For sequence-to-sequence models: the longest text has the shortest target.
_TARGET_LENGTHS = (5, 3, 4)

Batch = dict[str, Tensor]


def synthetic_examples(
    model: nn.Module,
    lengths: Sequence[int] = _LENGTHS,
    target_lengths: Sequence[int] = _TARGET_LENGTHS,
) -> list[Batch]:
    """Return batches of one example on the CPU, of the given lengths where there are any.

    Raises: UnsupportedModelError for a model whose inputs are neither token ids nor images, or
        that does not say how large its images are.
    """
    base = base_model(model)
    if takes_tokens(model):
        return _texts(model, base, lengths, target_lengths)
    main_input = getattr(base, "main_input_name", None)
    if main_input == "pixel_values":
        return [_image(model, base) for _ in lengths]
    raise UnsupportedModelError(
        f"{type(base).__name__} takes {main_input!r}, for which hf_dp cannot make synthetic "
        "examples to check the clipping engine with. Override DPTrainer.synthetic_batches(self) to "
        "return a list of them, each a batch of one."
    )


def takes_tokens(model: nn.Module) -> bool:
    """Return whether a model's main input is token ids."""
    base = base_model(model)
    main_input = getattr(base, "main_input_name", None)
    return main_input == "input_ids" and hasattr(base, "get_input_embeddings")


def _texts(
    model: nn.Module, base: Any, lengths: Sequence[int], target_lengths: Sequence[int]
) -> list[Batch]:
    config, task = base.config, _task(model)
    # Funnel has no end token.
    pad, eos = (getattr(config, name, None) for name in ("pad_token_id", "eos_token_id"))
    pad = pad if isinstance(pad, int) else 0
    vocabulary = base.get_input_embeddings().weight.shape[0]
    tokens = torch.tensor([token for token in range(vocabulary) if token != pad])
    has_mask = "attention_mask" in inspect.signature(base.forward).parameters
    alone = []
    for length, target_length in zip(lengths, target_lengths, strict=True):
        ids = tokens[torch.randint(len(tokens), (1, length))]
        if valid := getattr(base, "valid_input_ids", None):
            ids = valid(ids)
        if isinstance(eos, int) and 0 <= eos < vocabulary:
            ids[:, :-1][ids[:, :-1] == eos] = ids[0, 0] if ids[0, 0] != eos else tokens[0]
            ids[:, -1] = eos  # some heads read its position
            if eos != pad and length == max(lengths):
                ids[:, length // 2] = eos  # and some take rows with equal numbers of them only
        if task == "seq2seq_lm":
            labels = tokens[torch.randint(len(tokens), (1, target_length))]
        else:
            labels = _labels(base, task, ids)
        example = {"input_ids": ids, "labels": labels}
        if (targets := targets_of(model)) != ("labels",):
            places = {name: torch.randint(length, (1,)) for name in targets}
            example = {"input_ids": ids, **places}
        if has_mask:
            example["attention_mask"] = torch.ones_like(ids)
        alone.append(example)
    return alone


def made_up_tokens(model: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Return valid token ids (..., T) without padding; the last is the end token, if any."""
    base = base_model(model)
    config = getattr(base, "config", None)
    pad, eos = (getattr(config, name, None) for name in ("pad_token_id", "eos_token_id"))
    tokens = torch.full(shape, next(token for token in (1, 2, 3) if token not in (pad, eos)))
    if isinstance(eos, int):
        tokens[..., -1:] = eos  # some heads read its position
    valid = getattr(base, "valid_input_ids", None)
    return tokens if valid is None else valid(tokens)


def image_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the part of a model's configuration that says what images it takes."""
    return getattr(model.config, "vision_config", model.config)


def _image(model: nn.Module, base: Any) -> Batch:
    config = image_config(base)
    size, channels = (getattr(config, name, None) for name in ("image_size", "num_channels"))
    if size is None or channels is None:
        raise UnsupportedModelError(
            f"The configuration of {type(base).__name__} says image_size {size} and num_channels "
            f"{channels}, so hf_dp cannot make synthetic images to check the clipping engine with. "
            "Set them in config.json, or override DPTrainer.synthetic_batches(self) to return a "
            "list of images, each a batch of one."
        )
    height, width = (size, size) if isinstance(size, int) else size
    shape = (1, channels, height, width)
    return {
        "pixel_values": torch.randn(shape, dtype=base.dtype),
        "labels": _labels(base, _task(model), None),
    }


def _task(model: nn.Module) -> str:
    """Return the kind of task; assume one class per example for a loss of the user's own."""
    try:
        return task_of(model)
    except UnsupportedLossError:
        return "sequence_classification"


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
