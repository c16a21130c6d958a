"""Made-up rows in the format of a data set.

The self-check uses them so that it follows the path of real rows, collator included. Only names,
types and shapes of a real row are read, never a value.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hf_dp.batches.padding import LABELS
from hf_dp.batches.structure import Row, is_picture
from hf_dp.errors import DataError

_WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country"
).split()

_NUMBERS = (bool, int, float, np.generic)


def made_up_rows(templates: Sequence[Row], examples: Sequence[Mapping[str, Tensor]]) -> list[Row]:
    """Return rows in the templates' format with the contents of the synthetic examples.

    A column that the examples have (labels under any of their names) is taken from them. Others are
    zeros, random floats, made-up words or images, of the first template's shape. A column that in
    all templates is as long as the tokens, or else as the labels, is so in the rows.

    Raises: DataError when a value's type cannot be made up.
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
