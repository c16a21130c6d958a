"""Look at every row once, before the first draw, so that none ends the run at the step that draws
it.

A run that stops at a row tells that it was drawn. What is found here is said on the local console,
and nothing is kept but the layout: names, types and the range of lengths.
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
from hf_dp.errors import DataError

logger = logging.get_logger(__name__)

# share of rows of exactly the greatest length, from which they look cut from longer texts
_CHUNKS_FROM = 0.9
_FEW = 20  # rows of which nothing is concluded


@dataclass
class LookedOver:
    """What was found.

    Attributes: layout: of all examples. longest: index of the row with most tokens. at_full_length:
        rows as long as it.
    """

    layout: Layout
    longest: int = 0
    at_full_length: int = 0

    def look_like_chunks(self, rows: int) -> bool:
        """Return whether nearly all rows are exactly as long as the longest: then they may be cut
        from longer documents."""
        return rows >= _FEW and self.at_full_length >= _CHUNKS_FROM * rows


def look_over(
    examples: Examples, padding: Padding, limits: Limits, *, workers: int = 0, quiet: bool = True
) -> LookedOver:
    """Return the layout of a training set after a look at each of its rows.

    Args: workers: processes that fetch and collate. quiet: show no progress bar.

    Raises: DataError with the index of a row that differs from the first in columns or types, holds
        a value out of range or NaN, or fails to collate; or naming a column whose lengths differ
        and that cannot be padded.
    """
    found = LookedOver(Layout())
    most = -1
    each = tqdm(
        _all(examples, workers),
        total=len(examples),
        desc="Looking over the rows",
        disable=quiet,
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


def tokens_of(example: Example) -> int:
    """Return how many tokens an example has: those attended to, else all; 0 for one without."""
    sizes = {name: leaf for name, leaf in leaves(example) if isinstance(leaf, Tensor)}
    mask, ids = sizes.get("attention_mask"), sizes.get("input_ids")
    if mask is not None and ids is not None and mask.shape == ids.shape:
        return int(mask.sum())
    return 0 if ids is None else ids.numel()
