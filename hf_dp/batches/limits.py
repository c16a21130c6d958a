"""The values that a row of the training set may hold, by the model and its labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from hf_dp import losses
from hf_dp.batches.padding import LABELS
from hf_dp.batches.structure import Example, column, leaves
from hf_dp.errors import DataError

_BESIDE_TOKENS = ("attention_mask", "token_type_ids", "special_tokens_mask", "position_ids")
_TOKEN_LABELS = ("token_classification", "causal_lm", "masked_lm", "seq2seq_lm")


@dataclass(frozen=True)
class Limits:
    """Ranges of integers by column, from 0 to below the number given.

    Args:
        ignorable: columns that may also hold -100, the label of positions that are not predicted.
        as_long_as_tokens: columns with a value for each of the ``input_ids``.
        places: columns that name one of the row's own tokens.
        read_labels: labels in the type in which they are trained on.
        any_mask: whether an attention mask may have holes, begin with 0 or be 0 everywhere.
        marks: how often each row has tokens that stand for images, by id. The model puts what it
            makes of all images of a batch at all these places, in order: with one too few in a
            row, the row would take from its neighbor.
        of_choices: whether the label is the place of one of the row's choices.
        padded_on_the_left: whether the tokenizer pads on the left.
        check_tokens: raises DataError for attended tokens, (T,), that the model refuses.
    """

    below: Mapping[str, int] = field(default_factory=dict)
    ignorable: frozenset[str] = frozenset()
    as_long_as_tokens: frozenset[str] = frozenset()
    places: tuple[str, ...] = ()
    read_labels: Callable[[Tensor], Tensor] | None = None
    any_mask: bool = True
    marks: Mapping[int, int] = field(default_factory=dict)
    of_choices: bool = False
    padded_on_the_left: bool = False
    check_tokens: Callable[[Tensor], None] | None = None

    @classmethod
    def of(cls, model: nn.Module, own_loss: bool = False, side: str = "right") -> Limits:
        """Return the limits of a model, and of its labels unless the loss is the user's own."""
        base = losses.base_model(model)
        config = getattr(base, "config", None)
        below: dict[str, int | None] = {}
        embeddings = _table_of(base, "get_input_embeddings")
        if embeddings is not None:
            below = dict.fromkeys(("input_ids", "decoder_input_ids"), embeddings)
        below["token_type_ids"] = getattr(config, "type_vocab_size", None) or None
        task = "" if own_loss else losses.known_task(model)
        outputs = _table_of(base, "get_output_embeddings")
        if task in ("causal_lm", "masked_lm", "seq2seq_lm"):
            below |= dict.fromkeys(LABELS, outputs or getattr(config, "vocab_size", None))
        elif task == losses.CHOICE:  # of which each row has its own
            below |= dict.fromkeys(LABELS, None)
        elif task == "token_classification" or (task and _is_single_label(config)):
            below |= dict.fromkeys(LABELS, getattr(config, "num_labels", None))
        below["position_ids"] = getattr(config, "max_position_embeddings", None)
        known = {name: limit for name, limit in below.items() if isinstance(limit, int)}
        of_tokens = task in _TOKEN_LABELS and task != "seq2seq_lm"
        return cls(
            known,
            frozenset(LABELS) if task in _TOKEN_LABELS else frozenset(),
            frozenset(_BESIDE_TOKENS + (LABELS if of_tokens else ())),
            places=()
            if own_loss
            else tuple(n for n in losses.targets_of(model) if n in losses.SPAN),
            read_labels=partial(losses.labels_read, model) if task else None,
            any_mask=own_loss or not losses.takes_attention_mask(model),
            marks=dict.fromkeys(losses.placeholders_of(model), 0),
            of_choices=task == losses.CHOICE,
            padded_on_the_left=side == "left",
            check_tokens=losses.token_check(model),
        )

    def check(self, example: Example) -> None:
        """Raise DataError for a value out of range, a NaN, or columns unlike the tokens."""
        tokens = example.get("input_ids") if isinstance(example, dict) else None
        if isinstance(tokens, Tensor):
            self._check_tokens(example, tokens)
        for name, leaf in leaves(example):
            if not isinstance(leaf, Tensor) or not leaf.numel():
                continue
            if name == "labels" and self.read_labels is not None:
                leaf = self.read_labels(leaf)
            if leaf.is_floating_point():
                if self.marks and name == "pixel_values" and leaf.dim() > 3:
                    if not bool(leaf.flatten(-3).any(-1).all()):
                        why = "`pixel_values` of an image are all 0, as padding is."
                        raise DataError(f"{why} Leave the row out.")
                if bool(leaf.isnan().any()):
                    raise DataError(f"`{name}` holds NaN. Leave the row out, or give it a value.")
                continue
            limit = self.below.get(column(name))
            if limit is not None and leaf.dtype != torch.bool:
                self._check_range(name, leaf, limit)

    def _check_tokens(self, example: Mapping[str, object], tokens: Tensor) -> None:
        if not tokens.numel():
            raise DataError("it has no tokens. Leave the row out.")
        for name in self.as_long_as_tokens & example.keys():
            leaf = example[name]
            if not isinstance(leaf, Tensor) or leaf.dim() != tokens.dim():
                continue
            if leaf.shape != tokens.shape:
                raise DataError(
                    f"`{name}` has shape {tuple(leaf.shape)}, but `input_ids` has "
                    f"{tuple(tokens.shape)}. Give each token a value."
                )
        mask = example.get("attention_mask")
        if self.check_tokens is not None:
            attended = isinstance(mask, Tensor) and mask.shape == tokens.shape
            self.check_tokens(tokens[mask != 0] if attended else tokens.flatten())
        for token, count in self.marks.items():
            if (found := int((tokens == token).sum())) != count:
                raise DataError(
                    f"`input_ids` has the token {token}, which stands for an image or a part of "
                    f"one, {found} times, but row 0 has it {count} times. Expected the same number "
                    "in all rows: give each row one image of one size, and truncate texts only "
                    "after it."
                )
        label = example.get("labels")
        if self.of_choices and isinstance(label, Tensor):
            known = tokens.dim() == 3 and label.numel() == 1 and not label.is_floating_point()
            if not known or not 0 <= int(label) < tokens.shape[1]:
                raise DataError(
                    f"`labels` holds {label.flatten().tolist()}, but `input_ids` has the shape "
                    f"{tuple(tokens.shape)}. Expected (1, choices, tokens), and the place of one "
                    "of the row's choices, from 0."
                )
        for name in self.places:
            shown = mask if isinstance(mask, Tensor) else torch.ones_like(tokens)
            _check_place(name, example.get(name), shown)
        counts = not self.any_mask and "position_ids" not in example
        if counts and isinstance(mask, Tensor) and mask.dim() == 2:
            self._check_mask(mask[0] != 0)

    def _check_mask(self, attended: Tensor) -> None:
        """Raise DataError for a mask that :func:`hf_dp.losses.with_position_ids` would refuse."""
        begins_late = not bool(attended[0])
        holes = int((attended[1:] & ~attended[:-1]).sum()) - begins_late
        wrong = {
            "is 0 everywhere": not bool(attended.any()),
            "begins with 0, as if padded on the left": begins_late and not self.padded_on_the_left,
            "has a hole (0 between two 1), and with padding on the left positions would depend on "
            "neighbors (set tokenizer.padding_side = 'right')": holes and self.padded_on_the_left,
        }
        for what in (each for each, found in wrong.items() if found):
            raise DataError(f"its attention_mask {what}. Leave the row, or masked tokens, out.")

    def _check_range(self, name: str, leaf: Tensor, limit: int) -> None:
        low, high = (int(value) for value in leaf.aminmax())
        if low < 0 and column(name) in self.ignorable:
            leaf = leaf[leaf != losses.IGNORED_LABEL]
            low, high = (int(x) for x in leaf.aminmax()) if leaf.numel() else (0, high)
        if low < 0 or high >= limit:
            ignored = f", or {losses.IGNORED_LABEL} where nothing is predicted"
            also = ignored if column(name) in self.ignorable else ""
            raise DataError(
                f"`{name}` holds {low if low < 0 else high}. Expected whole numbers from 0 to "
                f"{limit - 1}{also}: check tokenizer, label names and config.num_labels."
            )


def _check_place(name: str, place: object, attended: Tensor) -> None:
    """Raise DataError unless a column names a token that is attended to."""
    if not isinstance(place, Tensor):
        return  # a missing column has an error of its own
    known = place.numel() == 1 and not place.is_floating_point()
    at = int(place) if known else -1
    if not known or not 0 <= at < attended.shape[-1] or not bool(attended.reshape(-1)[at]):
        raise DataError(
            f"`{name}` holds {place.flatten().tolist()}. Expected the place of one of the row's "
            f"{int((attended != 0).sum())} tokens, from 0. Where a text is cut before its answer, "
            "or has none, name token 0."
        )


def _table_of(base: nn.Module, getter: str) -> int | None:
    try:
        return int(getattr(base, getter)().weight.shape[0])
    except (AttributeError, NotImplementedError, IndexError):  # a model without one
        return None


def _is_single_label(config: object) -> bool:
    """Return whether labels are classes; for no problem_type, their type decides later."""
    kind = getattr(config, "problem_type", None)
    return kind == "single_label_classification" or (
        kind is None and getattr(config, "num_labels", 1) > 1
    )
