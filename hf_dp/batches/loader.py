"""A data loader whose items are logical batches, each a list of physical batches.

The list is empty for an empty sample. The loader is not passed through ``accelerator.prepare``: its
sharding hands ranks alternate logical batches, repeats the first at the tail and drops those of
unexpected size, so the result would no longer be a Poisson sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from multiprocessing.context import BaseContext
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from hf_dp.batches.examples import Examples
from hf_dp.batches.layout import Layout
from hf_dp.batches.padding import Padding
from hf_dp.batches.physical import physical_batches
from hf_dp.batches.structure import Batch, Example, leaves
from hf_dp.errors import DataError
from hf_dp.noise import SecretRandomness
from hf_dp.plans.samplers import Sampler as LogicalSampler

Watch = Callable[[LogicalSampler], Sampler[list[int]]]
T = TypeVar("T")
Place = int | tuple[int, ...]  # of a row, or of all rows of a drawn user


@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """How batches are made: memory and speed, never what a step computes.

    Args:
        physical_batch_size: most examples of a physical batch.
        max_tokens: most tokens of one, padding included; None: no limit.
        quiet: no progress bars.
        num_workers, pin_memory, persistent_workers, prefetch_factor, multiprocessing_context: as
            :class:`torch.utils.data.DataLoader` takes them.
    """

    physical_batch_size: int = 8
    max_tokens: int | None = None
    quiet: bool = False
    num_workers: int = 0
    pin_memory: bool = False
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    multiprocessing_context: BaseContext | str | None = None


@dataclasses.dataclass(frozen=True)
class PhysicalBatches:
    """Splits the examples of one sample into physical batches of similar length and pads each.

    Args:
        padding, layout: those of the training set.
        size: the maximum number of examples in a physical batch.
        max_tokens: the maximum number of tokens, padding included; None: no limit.
        one_shape: whether only examples of one shape share a physical batch. Formats shorter than
            float32 round an example's gradient to about 2^-8 of it, and differently for another
            padded length. So the length to which it is padded must not depend on its neighbors.
    """

    padding: Padding
    layout: Layout
    size: int
    max_tokens: int | None = None
    one_shape: bool = False

    def __call__(self, drawn: Sequence[Drawn[Example]]) -> list[Batch]:
        """Return the physical batches, each with the examples in its first dimension.

        Raises:
            DataError: an example is unlike those seen before training, or has no tokens although
                ``max_tokens`` counts them.
        """
        examples, keys = [one.unit for one in drawn], [one.key for one in drawn]
        for example in examples:
            self.layout.check(example)
        return [
            self.padding.together([examples[i] for i in group], self.layout)
            for group in self.cut(examples, keys)
        ]

    def cut(self, examples: Sequence[Example], keys: Sequence[int]) -> list[list[int]]:
        """Return the indices of the examples in each physical batch."""
        shapes = [shape_of(example) for example in examples] if self.one_shape else None
        return physical_batches(self.lengths(examples), keys, self.size, self.max_tokens, shapes)

    def lengths(self, examples: Sequence[Example]) -> list[int]:
        """Return the tokens of each example. Raises: DataError, as above."""
        lengths = [length_of(example) for example in examples]
        if self.max_tokens is not None and not all(lengths):
            raise DataError(
                "max_tokens_per_physical_batch is set, but an example has no `input_ids` to count. "
                "Leave it unset for data without tokens, or remove empty rows."
            )
        return lengths


def private_dataloader(
    examples: Examples,
    sampler: LogicalSampler,
    batches: PhysicalBatches,
    options: BatchOptions,
    watched: Watch | None = None,
) -> DataLoader:
    """Return a loader over the sampler's samples, drawn from the run's secret source.

    Args: watched: makes of the draws what goes through the model; None: all of it.
    """
    sampler = dataclasses.replace(sampler, random_bytes=examples.randomness.random_bytes)
    drawn = DrawnUnits(examples, examples.randomness)
    return loader_of(drawn, sampler if watched is None else watched(sampler), batches, options)


class Drawn(NamedTuple, Generic[T]):
    """A drawn unit, with secret bits of its own that decide beside whom it stands."""

    unit: T
    key: int


class DrawnUnits(Dataset[Drawn[Any]]):
    """Units (examples, or users' lists of them), each with a key that is fresh in every draw."""

    def __init__(self, units: Any, randomness: SecretRandomness):
        self.units, self.randomness = units, randomness

    def __len__(self) -> int:
        return len(self.units)

    def __getitems__(self, indices: Sequence[Place]) -> list[Drawn[Any]]:
        found = self.units.__getitems__(indices)
        # The index (of a user the first row's) matters only in tests.
        rows = [index if isinstance(index, int) else index[0] for index in indices]
        keys = [self.randomness.example_seed(row) for row in rows]
        return [Drawn(unit, key) for unit, key in zip(found, keys, strict=True)]

    def __getitem__(self, index: Place) -> Drawn[Any]:
        return self.__getitems__([index])[0]


def loader_of(
    drawn: DrawnUnits,
    sampler: LogicalSampler | Sampler[Any],
    batches: Callable[[Sequence[Drawn[Any]]], Sequence[object]],
    options: BatchOptions,
) -> DataLoader:
    """Return a loader of physical batches, without a shuffle or a sampler of its own."""
    return DataLoader(
        drawn,
        batch_sampler=sampler,
        collate_fn=batches,
        num_workers=options.num_workers,
        pin_memory=options.pin_memory,
        persistent_workers=options.persistent_workers,
        prefetch_factor=options.prefetch_factor,
        multiprocessing_context=options.multiprocessing_context,
    )


def length_of(example: Example) -> int:
    """Return the length of an example's tokens; 0 for one without tokens."""
    tokens = example.get("input_ids") if isinstance(example, dict) else None
    return tokens.shape[-1] if isinstance(tokens, Tensor) else 0


def shape_of(example: Example) -> Hashable:
    """Return the shapes of all tensors of an example, by name."""
    return tuple(
        (name, tuple(leaf.shape)) for name, leaf in leaves(example) if isinstance(leaf, Tensor)
    )
