"""Look up every row's ids before the first draw, where their range is not known from the model.

Entity ids, boxes and the tags of a page have tables of their own, and some models look up sums or
differences of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp.batches.examples import Examples
from hf_dp.batches.layout import Layout
from hf_dp.batches.padding import LABELS
from hf_dp.batches.structure import column
from hf_dp.clipping.sharding import is_sharded
from hf_dp.errors import DataError, HfDpError


class _LookedUp(Exception):
    """Ends a forward after its last table."""


def refuse_ids_beyond_tables(
    model: nn.Module,
    losses: Callable[[Any], Tensor],
    examples: Examples,
    layout: Layout,
    known: Mapping[str, int],
) -> None:
    """Raise DataError naming the first row whose ids the model's tables do not have, or on which
    it fails otherwise.

    Rows are tried only where an integer column has no known range. A forward ends after its last
    lookup, which in most models is before the first layer.

    Args: known: columns whose ranges were checked.
    """
    columns = [
        name
        for name, leaf in layout.leaves.items()
        if leaf.is_tensor and leaf.dtype.startswith(("int", "uint")) and not _is_known(name, known)
    ]
    tables: dict[nn.Module, str] = {
        m: name for name, m in model.named_modules() if isinstance(m, nn.Embedding)
    }
    if not columns or not tables:
        return
    training, whole = model.training, is_sharded(model)  # shards must meet in whole forwards
    try:
        model.eval()
        with torch.no_grad(), examples.randomness.streams(), _watched(tables, whole) as lookups:
            for index, example in enumerate(examples.all()):
                lookups.begin()
                try:
                    losses(example)
                except _LookedUp:
                    continue
                except Exception as problem:
                    said = problem if isinstance(problem, HfDpError) else repr(problem)
                    raise DataError(
                        f"Row {index} of the training set cannot be trained on: {said} Correct "
                        f"one of its columns {columns}, or leave the row out."
                    ) from problem
                lookups.end()
    finally:
        model.train(training)


def _is_known(name: str, known: Mapping[str, int]) -> bool:
    name = column(name)
    return name in known or name in LABELS or name.endswith("_mask")


class _Lookups:
    """Checks and counts lookups. Attributes: most: those of a whole forward."""

    def __init__(self, tables: Mapping[nn.Module, str], whole: bool):
        self._tables, self._whole, self.most, self._count = tables, whole, 0, 0

    def begin(self) -> None:
        self._count = 0

    def end(self) -> None:
        self.most = max(self.most, self._count)

    def check(self, table: Any, args: tuple[Any, ...]) -> None:
        if not args or not args[0].numel():
            return
        low, high = (int(value) for value in args[0].aminmax())
        if low < 0 or high >= table.num_embeddings:
            raise DataError(
                f"the model looks up {low if low < 0 else high} in `{self._tables[table]}`, which "
                f"has the ids 0 to {table.num_embeddings - 1}."
            )

    def count(self, table: Any, args: Any, output: Any) -> None:
        self._count += 1
        if self._count == self.most and not self._whole:
            raise _LookedUp


@contextmanager
def _watched(tables: Mapping[nn.Module, str], whole: bool) -> Iterator[_Lookups]:
    lookups = _Lookups(tables, whole)
    hooks = [table.register_forward_pre_hook(lookups.check) for table in tables]
    hooks += [table.register_forward_hook(lookups.count) for table in tables]
    try:
        yield lookups
    finally:
        for hook in hooks:
            hook.remove()
