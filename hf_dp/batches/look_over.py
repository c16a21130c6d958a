"""A look at every row before the first sample, so that no row ends the run when it is sampled.

A run that stops at a row reveals that the row was sampled. Findings are printed on the local
console, and only the layout is kept: names, types and the range of lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import datasets
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers.utils import logging

from hf_dp import losses
from hf_dp.batches.columns import Columns
from hf_dp.batches.examples import Examples
from hf_dp.batches.limits import Limits
from hf_dp.batches.padding import LABELS, Padding
from hf_dp.batches.structure import Example, Layout, leaves
from hf_dp.distributed.processes import Processes
from hf_dp.errors import DataError

logger = logging.get_logger(__name__)

# If at least this share of rows has exactly the greatest length, they look cut from longer texts.
_CHUNKS_FROM = 0.9
_FEW = 20  # nothing is concluded from fewer rows


@dataclass
class LookedOver:
    """What was found: the layout, how many rows were looked at, the index of that with the most
    tokens, how many have that many, and how many have nothing to predict."""

    layout: Layout
    rows: int
    longest: int = 0
    at_full_length: int = 0
    without_target: int = 0

    @property
    def look_like_chunks(self) -> bool:
        """Return whether nearly all rows are as long as the longest, as chunks are."""
        return self.rows >= _FEW and self.at_full_length >= _CHUNKS_FROM * self.rows


def look_over(
    examples: Examples,
    padding: Padding,
    limits: Limits,
    *,
    workers: int = 0,
    quiet: bool = True,
    first: int | None = None,
) -> LookedOver:
    """Return what a look at each row finds, or at the ``first`` ones by place. Raises: DataError,
    which names a row that cannot be used."""
    count = len(examples)
    rows: Any = examples.dataset
    if first is not None and first < count:
        count = first
        rows = rows.select(range(count)) if isinstance(rows, datasets.Dataset) else None
    columns = Columns(rows, examples.collator, limits)
    if columns.plain:
        with suppress(DataError):  # of a row that the look at each one names
            return _of_columns(columns, examples, padding, limits)
    found = LookedOver(Layout(), count)
    most = -1
    each = tqdm(
        _all(examples, workers, count),
        total=count,
        desc="Looking over the rows",
        disable=quiet or not Processes.here().is_main,
        leave=False,
    )
    for index, example in enumerate(each):
        try:
            found.layout.add(example)
            limits.check(example)
        except DataError as problem:
            raise DataError(f"{examples.name(index)} cannot be trained on: {problem}") from problem
        found.without_target += not has_target(example)
        length = tokens_of(example)
        if length > most:
            found.longest, most, found.at_full_length = index, length, 0
        found.at_full_length += length == most
    padding.check(found.layout)
    return found


def _of_columns(
    columns: Columns, examples: Examples, padding: Padding, limits: Limits
) -> LookedOver:
    """Return what was found by columns. The layout is that of the shortest and longest rows."""
    tokens = columns.tokens
    most = int((tokens == tokens.max()).sum())
    found = LookedOver(Layout(), len(tokens), int(tokens.argmax()), most)
    found.without_target = int((~columns.has_target).sum())
    for example in examples.__getitems__(columns.extremes):
        found.layout.add(example)
        limits.check(example)
    padding.check(found.layout)
    return found


def _all(examples: Examples, workers: int, count: int) -> Iterator[Example]:
    if not workers:
        return examples.all(count)
    return iter(DataLoader(examples, batch_size=None, sampler=range(count), num_workers=workers))


def has_target(example: Example) -> bool:
    """Return whether none of an example's labels is :data:`IGNORED_LABEL` everywhere."""
    labels = [leaf for name, leaf in leaves(example) if name in LABELS and isinstance(leaf, Tensor)]
    return all(bool((each != losses.IGNORED_LABEL).any()) for each in labels)


def tokens_of(example: Example) -> int:
    """Count an example's tokens: those attended to if it has a mask, otherwise all."""
    sizes = {name: leaf for name, leaf in leaves(example) if isinstance(leaf, Tensor)}
    mask, ids = sizes.get("attention_mask"), sizes.get("input_ids")
    if mask is not None and ids is not None and mask.shape == ids.shape:
        return int(mask.sum())
    return 0 if ids is None else ids.numel()
