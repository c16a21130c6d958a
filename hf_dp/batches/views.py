"""Several views of a row: each row that is drawn enters a step as K random views, clipped as one.

A view is one more reading of the row. Data set, transform and collator run again, on a secret
stream of their own, and dropout draws for each view by itself; views are made anew in each step.
The gradient of the mean of their losses, the mean of K gradients, is clipped once: De et al. 2022
(arXiv 2204.13650, augmentation multiplicity). A row's views are the rows of one unit
(:mod:`hf_dp.batches.units`). Whatever counts examples (losses, their noised sum, the divisor)
counts the row once, and a physical batch counts views.

**Draw, event and epsilon are those of one view, and one row is what they protect.** Fix a row, all
that was released before, and the draw, views and dropout of the other rows. Let r be what is random
in the row's own K views. It is drawn for them alone, so it depends neither on the draw, nor on
other rows, nor on the noise. Given r, the row adds J g(r) to the sum: J says whether it was drawn,
and g(r), the clipped mean gradient, is a function of the row, r and the past with |g(r)| <= C. The
event bounds every such function, so for each r it bounds the step with the row, P_r, against the
step without it, Q_r, in both directions. What is released is the mixture of the P_r, or of the Q_r,
over the same law of r. The hockey-stick divergence is jointly convex: that of the mixtures is at
most the largest of those of P_r and Q_r. As r is new in each step, this holds given all earlier
outcomes, and steps compose as ever. K occurs nowhere in it. What it rests on is one clip for all
views, since K views clipped one by one would move the sum by K C, and views that no other row has
a part in (:mod:`hf_dp.batches.examples`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler

from hf_dp._validate import invalid
from hf_dp.batches.examples import Examples
from hf_dp.batches.loader import BatchOptions, Place
from hf_dp.batches.structure import Batch, Example, leaves
from hf_dp.batches.units import Reduction, Rows
from hf_dp.clipping.sharding import is_sharded
from hf_dp.distributed.processes import Processes
from hf_dp.errors import UnsupportedModelError

ARGUMENT = "views_per_example"

# Readings in pairs, until one differs. A transform that changes one reading in ten leaves a pair
# equal with a probability of at most 0.9^2 + 0.1^2: all of these, below 1e-9.
_PAIRS, _AT_ONCE = 112, 16
_FORWARDS = 8


@dataclass(frozen=True)
class Views:
    """Says how the views of a unit become one gradient.

    Args: count: K > 1, of each row. of_rows: how a user's rows do; None: each row is a unit.
    """

    count: int
    of_rows: Reduction | None = None

    def scale(self, rows: int) -> float:
        """Return by what the losses of a unit's ``rows`` views, K of each of its rows, are
        multiplied before they add up: a row's is the mean over its views, a user's the mean or sum
        over rows."""
        scale = 1.0 if self.of_rows is None else self.of_rows.scale(rows // self.count)
        return scale / self.count


@dataclass(frozen=True)
class ViewDraws(Sampler[list[Rows]]):
    """Repeats each drawn row, or each row of a drawn user, ``count`` times: it is read as often."""

    draws: Iterable[Sequence[Place]]
    count: int

    def __iter__(self) -> Iterator[list[Rows]]:
        for drawn in self.draws:
            units = ((place,) if isinstance(place, int) else place for place in drawn)
            yield [tuple(row for row in unit for _ in range(self.count)) for unit in units]

    def __len__(self) -> int:
        return len(cast(Sized, self.draws))


def refuse_views(
    count: int,
    examples: Examples,
    rows: int,
    losses: Callable[[Batch], Tensor],
    model: nn.Module,
    options: BatchOptions,
) -> None:
    """Raise InvalidArgumentError where all views of a row are the same, as far as can be seen: no
    reading of a row differs from another one, nor do the losses of one reading in training, with
    dropout. UnsupportedModelError for views of a sharded model that a physical batch may cut apart.

    Only some of the first ``rows`` are read, which were looked over. Any other row may be one that
    cannot be trained on. What is found is said on the local console alone.
    """
    size, cut = options.physical_batch_size, options.max_tokens is not None
    if is_sharded(model) and (cut or count > size):
        raise UnsupportedModelError(
            f"{count} views of a row do not fit into a physical batch ({size} "
            f"rows{', and a limit on tokens' * cut}), and splitting them is not implemented for a "
            f"sharded model. Set per_device_train_batch_size to {count} or more, without "
            "max_tokens_per_physical_batch; or train with DDP."
        )
    here = Processes.here()  # all look, and go on alike: where one fails, the others hear of it
    if any(here.from_each(lambda: _readings_differ(examples, rows))):
        return
    if any(here.from_each(lambda: _losses_differ(examples, rows, losses, model))):
        return
    raise invalid(
        ARGUMENT,
        count,
        "to be 1 for a data set whose transform is not random, and a model without dropout: all "
        "views of a row are the same",
        "Set a random transform that runs when a row is read (dataset.with_transform, not "
        "dataset.map; in a recipe `augmentation`), a collator that masks at random, or the "
        "model's dropout.",
    )


def _readings_differ(examples: Examples, rows: int) -> bool:
    places = _spread(rows, _PAIRS)
    for first in range(0, _PAIRS, _AT_ONCE):
        some = places[first : first + _AT_ONCE]
        found = examples.__getitems__([*some, *some])
        if not all(map(_same, found[: len(some)], found[len(some) :])):
            return True
    return False


def _losses_differ(
    examples: Examples, rows: int, losses: Callable[[Batch], Tensor], model: nn.Module
) -> bool:
    training = model.training
    try:
        model.train()
        with torch.no_grad(), examples.randomness.streams():
            # As many forwards in each process: those of a sharded model meet in each.
            tried = [examples[place] for place in _spread(rows, _FORWARDS)]
            found = [(losses(example), losses(example)) for example in tried]
    finally:
        model.train(training)
    return any(not torch.equal(*pair) for pair in found)


def _spread(rows: int, count: int) -> list[int]:
    """Return ``count`` places among so many rows, some twice where they are few."""
    return [place * max(1, rows // count) % rows for place in range(count)]


def _same(one: Example, other: Example) -> bool:
    ours, theirs = dict(leaves(one)), dict(leaves(other))
    return ours.keys() == theirs.keys() and all(
        torch.equal(value, theirs[name]) if isinstance(value, Tensor) else value == theirs[name]
        for name, value in ours.items()
    )
