"""A look at every row before the first sample, so that no row ends the run when it is sampled.

A run that stops at a row reveals that the row was sampled. Findings are printed on the local
console, and only the layout is kept: names, types and the range of lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers.utils import logging

from hf_dp.batches.examples import Examples
from hf_dp.batches.layout import Layout
from hf_dp.batches.limits import Limits
from hf_dp.batches.padding import Padding
from hf_dp.batches.structure import Example, leaves
from hf_dp.distributed.processes import Processes
from hf_dp.errors import DataError
from hf_dp.losses import IGNORED_LABEL

logger = logging.get_logger(__name__)

# If at least this share of rows has exactly the greatest length, they look cut from longer texts.
_CHUNKS_FROM = 0.9
_FEW = 20  # nothing is concluded from fewer rows


@dataclass
class LookedOver:
    """What was found.

    Attributes:
        layout: that of all examples.
        longest: the index of the row with the most tokens.
        at_full_length: how many rows have that many tokens.
        without_target: how many rows have labels that are all -100, which train nothing.
    """

    layout: Layout
    longest: int = 0
    at_full_length: int = 0
    without_target: int = 0

    def look_like_chunks(self, rows: int) -> bool:
        """Return whether nearly all rows are as long as the longest, as chunks of documents are."""
        return rows >= _FEW and self.at_full_length >= _CHUNKS_FROM * rows


def look_over(
    examples: Examples, padding: Padding, limits: Limits, *, workers: int = 0, quiet: bool = True
) -> LookedOver:
    """Return the layout of a training set after a look at each of its rows.

    Args:
        workers: the number of processes that fetch and collate.
        quiet: whether to hide the progress bar, which only the main process shows.

    Raises:
        DataError: names a row that differs from the first in columns or types, holds a value out of
            range or NaN, or fails to collate; or a column of unequal lengths without a padding
            value.
    """
    found = LookedOver(Layout())
    most = -1
    each = tqdm(
        _all(examples, workers),
        total=len(examples),
        desc="Looking over the rows",
        disable=quiet or not Processes.here().is_main,
        leave=False,
    )
    for index, example in enumerate(each):
        try:
            found.layout.add(example)
            limits.check(example)
        except DataError as problem:
            raise DataError(
                f"Row {index} of the training set cannot be trained on: {problem}"
            ) from problem
        found.without_target += _has_no_target(example)
        length = tokens_of(example)
        if length > most:
            found.longest, most, found.at_full_length = index, length, 0
        found.at_full_length += length == most
    padding.check(found.layout)
    return found


def _all(examples: Examples, workers: int) -> Iterator[Example]:
    if not workers:
        return examples.all()
    return iter(
        DataLoader(examples, batch_size=None, sampler=range(len(examples)), num_workers=workers)
    )


def _has_no_target(example: Example) -> bool:
    labels = example.get("labels") if isinstance(example, dict) else None
    return isinstance(labels, Tensor) and bool((labels == IGNORED_LABEL).all())


def tokens_of(example: Example) -> int:
    """Count an example's tokens: those attended to if it has a mask, otherwise all."""
    sizes = {name: leaf for name, leaf in leaves(example) if isinstance(leaf, Tensor)}
    mask, ids = sizes.get("attention_mask"), sizes.get("input_ids")
    if mask is not None and ids is not None and mask.shape == ids.shape:
        return int(mask.sum())
    return 0 if ids is None else ids.numel()
