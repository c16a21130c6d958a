"""Padding to a common length with values that no loss and no attention sees.

Which value is right depends on what a column means, so its name and type decide. A column of
unequal lengths without a known value is refused before the first sample.

A row may also be padded by itself (:meth:`Padding.alone`), so that rows come in few shapes. How far
follows from its own length and from the model's positions, and whether follows from what all rows
share: names, types and ranks. It never follows from other rows, not even from the longest one, nor
from whether all are of one length. Otherwise one row could change the padding of all others, and so
what rounds their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_dp.batches.structure import Batch, Example, Layout, Leaf, column, combined
from hf_dp.errors import DataError
from hf_dp.losses import IGNORED_LABEL, base_model, known_task, positions_of, takes_attention_mask

LABELS = ("labels", "label", "label_ids")
# Columns with several numbers for each token, and what transformers' tokenizers pad them with.
_NESTED = {"bbox": 0}
_OF_THE_DECODER = ("decoder_input_ids", "decoder_attention_mask")


def bucket(length: int, positions: int | None = None) -> int:
    """Return the length, at least this one, to which a row is padded by itself: the next multiple
    of 8, or of an eighth of the power of two below it where that is more. So the lengths from one
    power of two to its double have 8 of these, and padding adds less than an eighth of 64 or more.
    None is above the ``positions`` that a model has, unless the row itself is."""
    step = max(8, 1 << length.bit_length() >> 4)
    padded = -(-length // step) * step
    return padded if positions is None else max(length, min(padded, positions))


@dataclass(frozen=True)
class Padding:
    """How columns of unequal length are padded.

    Args:
        pad_token_id: for token ids; None when neither tokenizer nor model has one.
        side: "right" or "left", the tokenizer's.
        pads_labels: whether labels may differ in length, as token labels and those of the user's
            own loss may.
        labels_side: "right" for an encoder-decoder, whose decoder counts positions from its first
            label; otherwise ``side``.
        values: fill values that the user declared, by column.
        own_loss: whether only the user knows what the labels mean.
        positions: the most tokens that the model has positions for; None for no limit.
    """

    pad_token_id: int | None = None
    decoder_pad_token_id: int | None = None
    pad_token_type_id: int = 0
    side: str = "right"
    pads_labels: bool = True
    labels_side: str = "right"
    values: Mapping[str, float] = field(default_factory=dict)
    own_loss: bool = False
    positions: int | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        tokenizer: object,
        values: Mapping[str, float] | None = None,
        own_loss: bool = False,
    ) -> Padding:
        """Return the padding of a model and its tokenizer or processor, if there is one."""
        config = getattr(base_model(model), "config", None)
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        # Nothing attends to padding (per-example losses require the mask), so any token will do for
        # a model without a padding token.
        of_config = getattr(config, "pad_token_id", None)
        if of_config is None and takes_attention_mask(model):
            of_config = 0
        of_tokenizer = getattr(tokenizer, "pad_token_id", None)
        side = getattr(tokenizer, "padding_side", None) or "right"
        return cls(
            pad_token_id=of_config if of_tokenizer is None else of_tokenizer,
            decoder_pad_token_id=of_tokenizer if of_config is None else of_config,
            pad_token_type_id=getattr(tokenizer, "pad_token_type_id", None) or 0,
            side=side,
            pads_labels=own_loss
            or known_task(model) not in ("sequence_classification", "image_classification"),
            labels_side="right" if getattr(config, "is_encoder_decoder", False) else side,
            values=dict(values or {}),
            own_loss=own_loss,
            positions=positions_of(model),
        )

    def check(self, layout: Layout) -> None:
        """Raise DataError for a column that cannot be padded, or a declared one that is missing."""
        unknown = sorted(self.values.keys() - {column(name) for name in layout.leaves})
        if unknown:
            raise DataError(
                f"padding_values names {unknown[0]!r}, but the collated rows have "
                f"{sorted(layout.leaves)}. Correct the name."
            )
        for name, leaf in layout.leaves.items():
            if not leaf.varying:
                continue
            dimension = self.dimension(name, len(leaf.least))
            if self.fill(name, leaf) is None or leaf.varying != (dimension,):
                raise DataError(_cannot_pad(name, leaf, dimension))

    def fill(self, name: str, leaf: Leaf) -> float | None:
        """Return the value that a column is padded with; None if none is known to be right."""
        name, is_float = column(name), leaf.dtype.startswith(("float", "bfloat", "complex"))
        if name in self.values or name in _NESTED:
            return self.values.get(name, _NESTED.get(name))
        if is_float:  # 0 is not padding for an additive mask, nor for a target
            return None
        if name in LABELS:
            return IGNORED_LABEL if self.pads_labels else None
        if name == "special_tokens_mask":
            return 1
        if name.endswith("attention_mask") or name == "position_ids":
            return 0
        if name == "token_type_ids":
            return self.pad_token_type_id
        known = {"input_ids": self.pad_token_id, "decoder_input_ids": self.decoder_pad_token_id}
        return known.get(name)

    def alone(self, example: Example) -> Example:
        """Return an example, or a batch of one shape, with each column padded to its
        :func:`bucket`; as it is where a column may have a length for which no padding is known."""
        layout = Layout()
        layout.add(example)
        lengthened = self._lengthened(layout)

        def lengthen(name: str, values: list[Example]) -> object:
            if name not in lengthened:
                return values[0]
            length = values[0].shape[self.dimension(name, values[0].dim())]
            return self._to(bucket(length, self.positions), name, values, layout)[0]

        return combined([example], lengthen)

    def as_long_as(self, other: Example, example: Example, layout: Layout) -> Example:
        """Return an example with each column that varies as long as another example's."""

        def lengthen(name: str, values: list[Example]) -> object:
            value, most = values
            if not layout.leaves[name].varying:
                return value
            dimension = self.dimension(name, value.dim())
            return self._to(most.shape[dimension], name, [value], layout)[0]

        return combined([example, other], lengthen)

    def _lengthened(self, layout: Layout) -> list[str]:
        """Return the columns that have a length, or none where one of them cannot be padded."""
        found = []
        for name, leaf in layout.leaves.items():
            declared, dimensions = column(name) in {*self.values, *_NESTED}, len(leaf.least)
            of_whole = column(name) in LABELS and not self.pads_labels
            if dimensions < 2 or (of_whole and not declared):
                continue
            unknown = column(name) in LABELS and self.own_loss
            if not declared and (dimensions > 2 or unknown or self.fill(name, leaf) is None):
                return []
            found.append(name)
        return found

    def together(self, examples: Sequence[Example], layout: Layout) -> Batch:
        """Return one batch of the examples, in order, each leaf padded to its longest."""

        def combine(name: str, values: list[Example]) -> object:
            if isinstance(values[0], Tensor):
                return torch.cat(self._padded(name, values, layout))
            if isinstance(values[0], list):
                return [item for value in values for item in value]
            return values[0]  # equal in all, by the layout

        return combined(list(examples), combine)

    def _padded(self, name: str, values: list[Tensor], layout: Layout) -> list[Tensor]:
        shapes = {value.shape for value in values}
        if len(shapes) == 1:
            return values
        dimension = self.dimension(name, values[0].dim())
        others = {(*shape[:dimension], *shape[dimension + 1 :]) for shape in shapes}
        if self.fill(name, layout.leaves[name]) is None or len(others) > 1:
            raise DataError(_cannot_pad(name, layout.leaves[name], dimension))
        return self._to(max(shape[dimension] for shape in shapes), name, values, layout)

    def _to(self, length: int, name: str, values: list[Tensor], layout: Layout) -> list[Tensor]:
        """Return the values padded to a length."""
        dimension = self.dimension(name, values[0].dim())
        fill = self.fill(name, layout.leaves[name])
        assert fill is not None
        if torch.tensor(fill).to(values[0].dtype) != fill:  # -100 would be true, or byte 156
            values = [value.long() for value in values]
        left = self._side(name) == "left"
        after = 2 * (values[0].dim() - 1 - dimension)  # F.pad counts from the last dimension

        def around(value: Tensor) -> tuple[int, ...]:
            more = length - value.shape[dimension]
            return (*[0] * after, *((more, 0) if left else (0, more)))

        return [F.pad(value, around(value), value=fill) for value in values]

    def dimension(self, name: str, dimensions: int) -> int:
        """Return the dimension of a column's length: the last one, or the first one of an example
        for boxes and for a column with a declared value."""
        return 1 if column(name) in {*self.values, *_NESTED} else dimensions - 1

    def _side(self, name: str) -> str:
        name = column(name)
        if name in _OF_THE_DECODER:
            return "right"
        return self.labels_side if name in LABELS else self.side


def _cannot_pad(name: str, leaf: Leaf, dimension: int) -> str:
    lengths = ", ".join(
        f"{low} to {high} in dimension {place}"
        for place, (low, high) in enumerate(zip(leaf.least, leaf.most))
        if low != high
    )
    return (
        f"The column `{name}` ({leaf.dtype}) differs in length between rows "
        f"({lengths or 'in this sample'}), and hf_dp knows no harmless padding value for its "
        f"dimension {dimension}. Pad it to one length in the data set or the collator (images: "
        "resize them, in the image processor or the transform), leave it out, or declare the "
        f"value: padding_values={{{column(name)!r}: ...}}."
    )
