"""Which values a row may hold, so that no row can end the run at the step that draws it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.batches.padding import LABELS
from hf_dp.batches.structure import Example, column, leaves
from hf_dp.errors import DataError, UnsupportedLossError
from hf_dp.losses import IGNORED_LABEL, base_model, task_of

_TOKEN_LABELS = ("token_classification", "causal_lm", "masked_lm", "seq2seq_lm")


@dataclass(frozen=True)
class Limits:
    """Ranges of integers by column, from 0 to the number given, itself excluded.

    Args: ignorable: columns that may also hold -100, the label of what is not predicted.
    """

    below: Mapping[str, int] = field(default_factory=dict)
    ignorable: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: nn.Module, own_loss: bool = False) -> Limits:
        """Return the limits of a model and, unless the loss is the user's own, of its task's labels."""
        base: Any = base_model(model)
        config = getattr(base, "config", None)
        below: dict[str, int | None] = {}
        embeddings = _input_embeddings(base)
        if embeddings is not None:
            below = dict.fromkeys(("input_ids", "decoder_input_ids"), embeddings)
        below["token_type_ids"] = getattr(config, "type_vocab_size", None) or None
        task = None if own_loss else _task(model)
        if task in ("causal_lm", "masked_lm", "seq2seq_lm"):
            below |= dict.fromkeys(LABELS, _vocabulary(base))
        elif task == "token_classification" or (task is not None and _is_single_label(config)):
            below |= dict.fromkeys(LABELS, getattr(config, "num_labels", None))
        known = {name: limit for name, limit in below.items() if isinstance(limit, int)}
        return cls(known, frozenset(LABELS) if task in _TOKEN_LABELS else frozenset())

    def check(self, example: Example) -> None:
        """Raise DataError for a value out of range, or a float that is not a number."""
        for name, leaf in leaves(example):
            if not isinstance(leaf, Tensor) or not leaf.numel():
                continue
            if leaf.is_floating_point():
                if bool(leaf.isnan().any()):
                    raise DataError(f"`{name}` holds NaN. Leave the row out, or give it a value.")
                continue
            limit = self.below.get(column(name))
            if limit is not None and leaf.dtype != torch.bool:
                self._check_range(name, leaf, limit)

    def _check_range(self, name: str, leaf: Tensor, limit: int) -> None:
        low, high = (int(value) for value in leaf.aminmax())
        if low < 0 and column(name) in self.ignorable:
            leaf = leaf[leaf != IGNORED_LABEL]
            if leaf.numel():
                low, high = (int(value) for value in leaf.aminmax())
            else:
                low = 0
        if low < 0 or high >= limit:
            also = f", or {IGNORED_LABEL} where nothing is predicted" if column(name) in self.ignorable else ""
            raise DataError(
                f"`{name}` holds {low if low < 0 else high}. Expected whole numbers from 0 to {limit - 1}{also}: check "
                "tokenizer, label names and config.num_labels."
            )


def _task(model: nn.Module) -> str | None:
    try:
        return task_of(model)
    except UnsupportedLossError:
        return None


def _input_embeddings(base: Any) -> int | None:
    try:
        return int(base.get_input_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError, IndexError):  # a model without a table of tokens
        return None


def _vocabulary(base: Any) -> int | None:
    try:
        return int(base.get_output_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError, IndexError):
        return getattr(getattr(base, "config", None), "vocab_size", None)


def _is_single_label(config: Any) -> bool:
    """Labels are classes. (Where problem_type is None it follows from their type; floats are not held against this.)"""
    kind = getattr(config, "problem_type", None)
    return kind == "single_label_classification" or (kind is None and getattr(config, "num_labels", 1) > 1)
