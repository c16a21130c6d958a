"""Look up every row's ids before the first draw, where their range is not known from the model.

Entity ids, boxes and the tags of a page have tables of their own, and some models look up sums or
differences of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hf_dp.batches.examples import Examples
from hf_dp.batches.layout import Layout
from hf_dp.batches.padding import LABELS
from hf_dp.batches.structure import Batch, column
from hf_dp.errors import DataError, HfDpError


def refuse_ids_beyond_tables(
    model: nn.Module,
    losses: Callable[[Batch], Tensor],
    examples: Examples,
    layout: Layout,
    known: Mapping[str, int],
) -> None:
    """Raise DataError naming the first row whose ids the model's tables do not have, or on which
    it fails otherwise. Rows are tried only where an integer column has no known range.

    Args: known: columns whose ranges were checked.
    """
    checked = (*known, *LABELS)
    columns = [
        name
        for name, leaf in layout.leaves.items()
        if leaf.is_tensor
        and leaf.dtype.startswith(("int", "uint"))
        and not (column(name) in checked or name.endswith("_mask"))
    ]
    if not columns or not any(isinstance(m, nn.Embedding) for m in model.modules()):
        return
    training = model.training
    try:
        model.eval()
        with torch.no_grad(), examples.randomness.streams(), _watched(model):
            for index, example in enumerate(examples.all()):
                try:
                    losses(example)
                except Exception as problem:
                    said = problem if isinstance(problem, HfDpError) else repr(problem)
                    raise DataError(
                        f"Row {index} of the training set cannot be trained on: {said} Correct "
                        f"one of its columns {columns}, or leave the row out."
                    ) from problem
    finally:
        model.train(training)


@contextmanager
def _watched(model: nn.Module) -> Iterator[None]:
    """Raise DataError inside for an id that a table lacks; a GPU would end the process."""

    def check(name: str, table: nn.Embedding, args: tuple[Tensor, ...]) -> None:
        if not args or not args[0].numel():
            return
        low, high = (int(value) for value in args[0].aminmax())
        if low < 0 or high >= table.num_embeddings:
            raise DataError(
                f"the model looks up {low if low < 0 else high} in `{name}`, which has the ids 0 "
                f"to {table.num_embeddings - 1}."
            )

    hooks = [
        table.register_forward_pre_hook(lambda table, args, name=name: check(name, table, args))
        for name, table in model.named_modules()
        if isinstance(table, nn.Embedding)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
