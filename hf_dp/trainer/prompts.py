"""The prompts and the targets of a batch whose rows hold both: what a decoder is asked, and what it
should answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_dp.errors import DataError
from hf_dp.losses import IGNORED_LABEL

_BESIDE_TOKENS = ("attention_mask", "token_type_ids")
_MADE_ANEW = ("labels", "position_ids")


@dataclass(frozen=True)
class Prompts:
    """What stands before the targets of b rows.

    Attributes:
        inputs: of ``generate``: tokens, mask and token types, (b, P), padded on the left to the
            longest prompt.
        targets: (b, T) tokens, padded on the right with -100; None where the rows have no labels.
    """

    inputs: dict[str, Tensor]
    targets: Tensor | None

    @property
    def length(self) -> int:
        """The number of tokens of the longest prompt."""
        return self.inputs["input_ids"].shape[1]


def split_rows(inputs: Mapping[str, Any], pad_token_id: int) -> Prompts:
    """Cut each row before its first label that is not -100.

    A row without such a label is a prompt as a whole, and its target is empty.

    Args:
        inputs: a collated batch with ``input_ids``, ``attention_mask`` and perhaps ``labels``, each
            (b, T), padded on any side.
        pad_token_id: put on the left of the shorter prompts, where nothing attends.

    Raises: DataError for a row without prompt, for a row with labels in several places, and for
        inputs that cannot be cut.
    """
    tokens, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if not isinstance(tokens, Tensor) or not isinstance(mask, Tensor):
        raise DataError(
            "Expected batches with `input_ids` and `attention_mask` to cut prompts out of, got "
            f"{sorted(inputs)}. Let the data collator return both."
        )
    other = sorted(set(inputs) - {"input_ids", *_BESIDE_TOKENS, *_MADE_ANEW})
    if other:
        raise DataError(
            f"predict_with_generate cuts prompts out of rows, and does not know how to cut {other}."
            " Leave these columns out (remove_unused_columns=True), or set "
            "predict_with_generate=False."
        )
    attended, labels = mask != 0, inputs.get("labels")
    if labels is None:
        is_target = torch.zeros_like(attended)
    elif labels.shape == tokens.shape:
        is_target = attended & (labels != IGNORED_LABEL)
    else:
        raise DataError(
            f"Expected `labels` of the shape of `input_ids`, {tuple(tokens.shape)}, to cut prompts "
            f"out of rows, got {tuple(labels.shape)}."
        )
    is_prompt = attended & (is_target.cumsum(1) == 0)
    _refuse_rows(is_target, is_prompt)
    cut = {name: inputs[name] for name in ("input_ids", *_BESIDE_TOKENS) if name in inputs}
    fill = {"input_ids": pad_token_id}
    return Prompts(
        {
            name: _padded([*map(_taken, value, is_prompt)], fill.get(name, 0), left=True)
            for name, value in cut.items()
        },
        None if labels is None else _padded([*map(_taken, labels, is_target)], IGNORED_LABEL),
    )


def _refuse_rows(is_target: Tensor, is_prompt: Tensor) -> None:
    begins = is_target & ~F.pad(is_target[:, :-1], (1, 0))
    if bool((begins.sum(1) > 1).any()):
        raise DataError(
            "A row has labels in several places (turns that interleave with prompts), and "
            "predict_with_generate generates one answer for each row. Evaluate on rows with one "
            "answer (the earlier turns as prompt, labeled -100), or set "
            "predict_with_generate=False."
        )
    if not bool(is_prompt.any(1).all()):
        raise DataError(
            "A row has no prompt: its first token has a label, so there is nothing to generate "
            "from. Set the labels of prompts to -100 (a collator that copies input_ids to labels "
            "does not), or set predict_with_generate=False."
        )


def _taken(row: Tensor, kept: Tensor) -> Tensor:
    return row[kept]


def _padded(rows: list[Tensor], value: int, left: bool = False) -> Tensor:
    longest = max(len(row) for row in rows)
    return torch.stack(
        [
            F.pad(row, (longest - len(row), 0) if left else (0, longest - len(row)), value=value)
            for row in rows
        ]
    )
