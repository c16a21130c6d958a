"""Made-up rows in the format of a data set, so that the self-check goes the way that rows go, collator included.

Of a real row only names, types and shapes are read, never a value.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_dp.batches.padding import LABELS
from hf_dp.errors import DataError

_WORDS = "time year people way day man thing woman life child world school state family student group country".split()


def made_up_rows(templates: Sequence[Any], examples: Sequence[Mapping[str, Tensor]]) -> list[Any]:
    """Return rows of the template's format that say what the synthetic examples say.

    Args:
        templates: rows of the data set. examples: batches of one, with the model's inputs and ``labels``.

    A column that the examples have (labels under any of their names) is theirs; others are zeros, random floats, made-up
    words or images, of the first template's shape. A column that in all templates is as long as their tokens is as long as
    the example's.

    Raises: DataError for a type that cannot be made up.
    """
    aligned = set.intersection(*map(_as_long_as_the_tokens, templates))
    return [_like(templates[0], None, dict(example), aligned) for example in examples]


def _as_long_as_the_tokens(template: Any) -> set[str]:
    tokens = template.get("input_ids") if isinstance(template, Mapping) else None
    length = _length(tokens)
    return set() if length is None else {str(name) for name, value in template.items() if _length(value) == length}


def _length(value: Any) -> int | None:
    if isinstance(value, (Tensor, np.ndarray)):
        return len(value) if value.ndim else None
    return len(value) if isinstance(value, (list, tuple)) else None


def _like(value: Any, name: str | None, example: Mapping[str, Tensor], aligned: set[str]) -> Any:
    known = None if name is None else example.get("labels" if name in LABELS else name)
    if known is not None and (known[0].dim() == 0) == isinstance(value, (bool, int, float)):
        return _in_the_form_of(value, known[0])
    if isinstance(value, Mapping):
        return {key: _like(each, str(key), example, aligned) for key, each in value.items()}
    if value is None or isinstance(value, (bool, int)):
        return value if value is None else type(value)(0)
    if isinstance(value, float):
        return random.gauss(0, 1)
    tokens = example["input_ids"].shape[1] if "input_ids" in example else 5
    if isinstance(value, str):
        return " ".join(random.choices(_WORDS, k=tokens))
    if isinstance(value, (Tensor, np.ndarray)):
        shape = (tokens, *value.shape[1:]) if name in aligned else tuple(value.shape)
        made = torch.randn(shape) if _is_float(value) else torch.zeros(shape, dtype=torch.long)
        return _cast(made, value)
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(item, (bool, int, float, str)) for item in value):
            count = tokens if name in aligned else len(value)
            return type(value)(_like(value[0], None, example, aligned) for _ in range(count))
        return type(value)(_like(item, None, example, aligned) for item in value)
    if hasattr(value, "getbands") and hasattr(value, "size"):  # a PIL image
        from PIL import Image

        width, height = value.size
        return Image.fromarray(np.random.randint(0, 256, (height, width, 3), np.uint8)).convert(value.mode)
    raise DataError(f"a {type(value).__name__} cannot be made up")


def _in_the_form_of(value: Any, known: Tensor) -> Any:
    """Return a tensor as the template has it: as list, array, tensor or number."""
    if isinstance(value, (Tensor, np.ndarray)):
        return _cast(known, value)
    if isinstance(value, (bool, int, float)):
        return type(value)(known.item())
    return type(value)(known.tolist()) if isinstance(value, (list, tuple)) else known.tolist()


def _cast(made: Tensor, value: Any) -> Any:
    return made.to(value.dtype) if isinstance(value, Tensor) else made.numpy().astype(value.dtype)


def _is_float(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, Tensor) else np.issubdtype(value.dtype, np.floating)
