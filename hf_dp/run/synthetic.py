"""Synthetic examples in a model's declared ranges, for the self-check, and rows in the format of a
data set, which go through its collator; no value of a private row is used."""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_dp.batches.padding import LABELS
from hf_dp.batches.structure import Row, is_picture
from hf_dp.errors import DataError, UnsupportedModelError
from hf_dp.losses import (
    CHOICE,
    IGNORED_LABEL,
    base_model,
    known_task,
    placeholders_of,
    reads_before_padding,
    targets_of,
)

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
    *,
    choices: int = 2,
    row: Tensor | None = None,
) -> list[Batch]:
    """Return batches of one example on the CPU, of the given lengths where there are any, with so
    many ``choices`` where a model takes several. Where it takes images in a text, of a ``row`` of
    tokens, (1, T), those that stand for one remain at their places, before the others. Raises:
    UnsupportedModelError for a model that does not say what token ids or images it takes."""
    base = base_model(model)
    if takes_tokens(model):
        texts = _texts(model, base, lengths, target_lengths, choices)
        return texts if row is None else [_with_marks(model, each, row) for each in texts]
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
    model: nn.Module, base: Any, lengths: Sequence[int], target_lengths: Sequence[int], choices: int
) -> list[Batch]:
    config, task = base.config, known_task(model)
    vocabulary = base.get_input_embeddings().weight.shape[0]
    pad, eos = getattr(config, "pad_token_id", None), _end_token(model)
    pad = pad if isinstance(pad, int) else 0
    none = {pad, *placeholders_of(model)}
    tokens = torch.tensor([token for token in range(vocabulary) if token not in none])
    has_mask = "attention_mask" in inspect.signature(base.forward).parameters
    alone = []
    for length, target_length in zip(lengths, target_lengths, strict=True):
        ids = tokens[torch.randint(len(tokens), (choices if task == CHOICE else 1, length))]
        if eos is not None:
            ids[:, :-1][ids[:, :-1] == eos] = ids[0, 0] if ids[0, 0] != eos else tokens[0]
            ids[:, -1] = eos  # some heads read its position
            if eos != pad and length == max(lengths):
                ids[:, length // 2] = eos  # and some take rows with equal numbers of them only
        if valid := getattr(base, "valid_input_ids", None):
            ids = valid(ids)
        if task == CHOICE:
            ids, labels = ids[None], torch.randint(choices, (1,))
        elif task == "seq2seq_lm":
            labels = tokens[torch.randint(len(tokens), (1, target_length))]
        else:
            labels = _labels(base, task, ids)
        example = {"input_ids": ids, "labels": labels}
        if (targets := targets_of(model)) != ("labels",):
            places = {name: torch.randint(length, (1,)) for name in targets}
            example = {"input_ids": ids, **places}
        if has_mask:
            example["attention_mask"] = torch.ones_like(ids)
            if task == CHOICE:
                example["attention_mask"][:, 0, -1] = 0  # shorter than the others
        alone.append(example)
    return alone


def up_to_marks(model: nn.Module, ids: Tensor) -> int:
    """Return how many tokens there are up to the last that stands for an image and the like."""
    places = _marks(model, ids).nonzero()
    return int(places[:, -1].max()) + 1 if len(places) else 0


def _marks(model: nn.Module, ids: Tensor) -> Tensor:
    return torch.isin(ids, torch.tensor(placeholders_of(model), dtype=ids.dtype))


def _with_marks(model: nn.Module, example: Batch, row: Tensor) -> Batch:
    """Return an example that begins with as many more tokens as lead to the row's last image."""
    row = row[:, : up_to_marks(model, row)]
    marks, ids = _marks(model, row), example["input_ids"]
    labels = torch.cat([ids[:, :1].expand_as(row), example["labels"]], 1)
    ids = torch.cat([torch.where(marks, row, ids[:, :1]), ids], 1)
    marks = _marks(model, ids)
    return {
        "input_ids": ids,
        "labels": labels.masked_fill(marks, IGNORED_LABEL),
        "attention_mask": torch.ones_like(ids),
        "token_type_ids": marks.long(),
    }


def _end_token(model: nn.Module) -> int | None:
    """Return the end token; None where the vocabulary has none, whatever the configuration says,
    and where a class is read before it, because it pads."""
    base: Any = base_model(model)
    config = getattr(base, "config", None)
    eos = getattr(config, "eos_token_id", None)
    if not isinstance(eos, int) or not hasattr(base, "get_input_embeddings"):
        return None  # as of a module of one's own
    if eos == getattr(config, "pad_token_id", None) and reads_before_padding(model):
        return None
    return eos if 0 <= eos < base.get_input_embeddings().weight.shape[0] else None


def made_up_tokens(model: nn.Module, shape: tuple[int, ...], row: Tensor) -> Tensor:
    """Return valid token ids (..., T) without padding; the last is the end token, if any. Of a row
    (..., S), tokens that stand for images and the like remain at their places."""
    base = base_model(model)
    config = getattr(base, "config", None)
    pad, eos = getattr(config, "pad_token_id", None), _end_token(model)
    others = (pad, eos, *placeholders_of(model))
    tokens = torch.full(shape, next(token for token in itertools.count(1) if token not in others))
    if eos is not None:
        tokens[..., -1:] = eos  # some heads read its position
    row = row[..., : shape[-1]]
    here = tokens[..., : row.shape[-1]]
    here.copy_(torch.where(_marks(model, row), row, here))
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
        "labels": _labels(base, known_task(model), None),
    }


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


# -- rows in the format of a data set: of a real row only names, types and shapes are read --

_WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country"
).split()

_NUMBERS = (bool, int, float, np.generic)


def made_up_rows(templates: Sequence[Row], examples: Sequence[Mapping[str, Tensor]]) -> list[Row]:
    """Return rows in the templates' format with the contents of the synthetic examples.

    A column that the examples have (labels under any of their names) is taken from them. Others are
    zeros, random floats, synthetic words or images, of the first template's shape. A column that in
    all templates is as long as the tokens, or else as the labels, is so in the rows.
    """
    aligned = dict.fromkeys(_as_long_as(templates, LABELS), "labels")
    aligned |= dict.fromkeys(_as_long_as(templates, ("input_ids",)), "input_ids")
    return [_like(templates[0], None, dict(example), aligned) for example in examples]


def _as_long_as(templates: Sequence[Row], names: Sequence[str]) -> set[str]:
    """Return the columns that in all templates are as long as the first known of ``names``."""
    found = []
    for template in templates:
        given = template if isinstance(template, Mapping) else {}
        length = next((_length(given[name]) for name in names if name in given), None)
        alike = (name for name in given if length is not None and _length(given[name]) == length)
        found.append(set(map(str, alike)))
    return set.intersection(*found)


def _length(value: object) -> int | None:
    if isinstance(value, (Tensor, np.ndarray)):
        return len(value) if value.ndim else None
    return len(value) if isinstance(value, (list, tuple)) else None


def _like(
    value: Row, name: str | None, example: Mapping[str, Tensor], aligned: Mapping[str, str]
) -> Row:
    known = None if name is None else example.get("labels" if name in LABELS else name)
    if known is not None and (known[0].dim() == 0) == isinstance(value, _NUMBERS):
        return _in_the_form_of(value, known[0])
    if isinstance(value, Mapping):
        return {key: _like(each, str(key), example, aligned) for key, each in value.items()}
    if value is None:
        return None
    if isinstance(value, _NUMBERS):
        return type(value)(random.gauss(0, 1) if isinstance(value, (float, np.floating)) else 0)
    tokens = example["input_ids"].shape[1] if "input_ids" in example else 5
    beside = example.get(aligned.get(name or "", ""))  # the tensor whose length the column has
    length = None if beside is None or beside.dim() < 2 else beside.shape[1]
    if isinstance(value, str):
        return " ".join(random.choices(_WORDS, k=tokens))
    if isinstance(value, (Tensor, np.ndarray)):
        shape = tuple(value.shape) if length is None else (length, *value.shape[1:])
        made = torch.randn(shape) if _is_float(value) else torch.zeros(shape, dtype=torch.long)
        return _cast(made, value)
    if isinstance(value, (list, tuple)):
        plain = all(isinstance(item, (*_NUMBERS, str)) for item in value)
        if value and (plain or length is not None):  # such as a box for each token
            count = len(value) if length is None else length
            return type(value)(_like(value[0], None, example, aligned) for _ in range(count))
        items = [_like(item, None, example, aligned) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    if is_picture(value):
        from PIL import Image

        width, height = value.size
        pixels = np.random.randint(0, 256, (height, width, 3), np.uint8)
        return Image.fromarray(pixels).convert(value.mode)
    raise DataError(f"a {type(value).__name__} cannot be made up")


def _in_the_form_of(value: Row, known: Tensor) -> Row:
    """Return a tensor as the template has it: as list, array, tensor or number."""
    if isinstance(value, (Tensor, np.ndarray)):
        return _cast(known, value)
    if isinstance(value, _NUMBERS):
        return type(value)(known.item())
    first = next(iter(value), None)
    if isinstance(first, (bool, int)):
        known = known.to(torch.bool if isinstance(first, bool) else torch.long)
    return type(value)(known.tolist()) if isinstance(value, (list, tuple)) else known.tolist()


def _cast(made: Tensor, value: Tensor | np.ndarray) -> Tensor | np.ndarray:
    return made.to(value.dtype) if isinstance(value, Tensor) else made.numpy().astype(value.dtype)


def _is_float(value: Tensor | np.ndarray) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point()
    return np.issubdtype(value.dtype, np.floating)
