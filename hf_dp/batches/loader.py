"""A data loader whose items are logical batches, each a list of physical batches.

The list is empty for an empty sample. The loader is not passed through ``accelerator.prepare``: its
sharding hands ranks alternate logical batches, repeats the first at the tail and drops those of
unexpected size, so the result would no longer be a Poisson sample.

How a logical batch is cut into physical ones affects memory and padding. Which examples share one
may hardly depend on any one of them: each product over a batch is rounded, and if all others
regrouped when one example leaves, the rounding of all of them would change. So a batch is a leaf of
a trie. An example's path is its own *key*: its length, then bits that were drawn for it alone. A
node with more examples than fit is split by the next bit.

**If one example leaves, at most** ``size`` **others get into another batch.** Only nodes on its
path lose an example, and whoever fits into a batch still does so without it. Take the highest node
that must be split with the example and need not be without it. If there is one, its other examples
are one batch now, hence at most ``size``; all others keep theirs. If there is none, only the leaf
changes, to which the example belonged. (Users with several rows are units of one key. Of a draw
that is truncated, one example leaves and another joins: twice as many.)
"""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import warnings
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from multiprocessing.context import BaseContext
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hf_dp import _validate
from hf_dp.batches.examples import Examples
from hf_dp.batches.padding import Padding
from hf_dp.batches.structure import Batch, Example, Layout, leaves
from hf_dp.errors import DataError
from hf_dp.plans.samplers import Draws, Sampler
from hf_dp.statement.facts import ANY

KEY_BITS = 64  # of a drawn key
Watch = Callable[[Sampler], Draws]
T = TypeVar("T")
Place = int | tuple[int, ...]  # of a row, or of all rows of a drawn user


@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """How batches are made: memory and speed, never what a step computes.

    Args:
        physical_batch_size: most examples of a physical batch.
        max_tokens: most tokens of one, padding included; None: no limit.
        shapes: "any"; or "one": each is filled up with examples that count nothing, and all are as
            long as the longest may be; or "few": as long as that, or a half, a quarter or an eighth
            of it. How many batches a draw has, and of which length, still depends on the draw.
        quiet: no progress bars.
        num_workers, pin_memory, persistent_workers, prefetch_factor, multiprocessing_context: as
            :class:`torch.utils.data.DataLoader` takes them.
    """

    physical_batch_size: int = 8
    max_tokens: int | None = None
    shapes: str = ANY
    quiet: bool = False
    num_workers: int = 0
    pin_memory: bool = False
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    multiprocessing_context: BaseContext | str | None = None


@dataclasses.dataclass(frozen=True)
class PhysicalBatches:
    """Splits the examples of one sample into physical batches of similar length and pads each.

    Args: one_shape: whether only examples of one shape share a physical batch. Formats shorter than
        float32 round an example's gradient to about 2^-8 of it, and differently for another padded
        length. So the length to which it is padded must not depend on its neighbors. Each is padded
        by itself (:meth:`hf_dp.batches.padding.Padding.alone`), so that there are few shapes.
        fillers: examples that count nothing, from short to long; none for batches of any shape.
        An example is padded to the first that is as long. It shares a batch with examples of that
        length, and the filler fills the batch up to ``size``. So there are as many shapes as
        fillers, and which one an example has depends on its own length alone. A filler has a weight
        of exactly 0 in sums over a batch, and moves nobody to another one. The longest also stands
        for an example that is longer.
    """

    padding: Padding
    layout: Layout
    size: int
    max_tokens: int | None = None
    one_shape: bool = False
    fillers: Sequence[Example] = ()

    def __call__(self, drawn: Sequence[Drawn[Example]]) -> list[Batch]:
        """Return the physical batches, each with the examples in its first dimension; those of
        which some do not count as :class:`Masked`."""
        if self.fillers:
            drawn = [
                one if self.filler(one.unit) else Drawn(self.fillers[-1], one.key, frozenset({0}))
                for one in drawn
            ]
        examples, keys = [self.shaped(one.unit) for one in drawn], [one.key for one in drawn]
        reads = [Read(each, not one.missing) for each, one in zip(examples, drawn, strict=True)]
        return [self.padded([reads[i] for i in group]) for group in self.cut(examples, keys)]

    def filler(self, example: Example) -> Example | None:
        """Return the first filler that is as long as an example, or None. Raises: DataError, as
        :meth:`Layout.check`."""
        self.layout.check(example)
        found = dict(shape_of(example))
        return next((each for each in self.fillers if _fits(found, dict(shape_of(each)))), None)

    def padded(self, reads: Sequence[Read]) -> Batch:
        """Return one physical batch, in order."""
        if self.fillers:
            filler = self.filler(reads[0].example)
            reads = [*reads, *[Read(filler, False)] * (self.size - len(reads))]
        batch = self.padding.together([example for example, _ in reads], self.layout)
        counts = [counts for _, counts in reads]
        return batch if all(counts) else Masked(batch, torch.tensor(counts))

    def shaped(self, example: Example) -> Example:
        """Return an example in its shape. A model that takes one example at a time may be one that
        takes no padding. Raises: DataError, as :meth:`Layout.check`."""
        self.layout.check(example)
        if self.fillers:
            return self.padding.as_long_as(self.filler(example), example, self.layout)
        return self.padding.alone(example) if self.one_shape and self.size > 1 else example

    def cut(self, examples: Sequence[Example], keys: Sequence[int]) -> list[list[int]]:
        """Return the indices of the examples in each physical batch."""
        alike = self.one_shape or self.fillers
        shapes = [shape_of(example) for example in examples] if alike else None
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


def physical_batches(
    lengths: Sequence[int],
    keys: Sequence[int],
    size: int,
    max_tokens: int | None = None,
    shapes: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Cut the positions 0..len(lengths)-1 into groups of at most ``size``.

    On average they are ln 2 = 0.69 full. An empty draw gives no group. The longest examples come
    first, so that a group too large for the memory fails at once.

    Args:
        keys: below 2^64, drawn for each example alone. Examples of equal length and key share a
            group; of keys with 63 random bits, one pair in 2^63 is equal.
        max_tokens: the largest number of tokens in a group, including padding to its longest
            example. An example that is longer gets a group of its own.
        shapes: the shape of each example; only examples of equal shape share a group.
    """
    _validate.integer("size", size, 1)
    if max_tokens is not None:
        _validate.integer("max_tokens", max_tokens, 1)
    paths = [(length << KEY_BITS) | key for length, key in zip(lengths, keys, strict=True)]
    of_shape: dict[Hashable, list[int]] = {}
    for place in sorted(range(len(paths)), key=lambda place: -paths[place]):
        of_shape.setdefault(None if shapes is None else shapes[place], []).append(place)

    def fits(node: list[int]) -> bool:
        tokens = len(node) * lengths[node[0]]
        return len(node) <= size and (max_tokens is None or tokens <= max_tokens)

    groups = []
    nodes = list(of_shape.values())[::-1]
    while nodes:
        node = nodes.pop()
        first, last = paths[node[0]], paths[node[-1]]
        if len(node) == 1 or first == last or fits(node):
            groups.append(node)
            continue
        # The next bit that is not the same in all: skipping one that is splits nothing off.
        ones = first >> ((first ^ last).bit_length() - 1) << ((first ^ last).bit_length() - 1)
        cut = bisect_left(node, 1 - ones, key=lambda place: -paths[place])
        nodes += [node[cut:], node[:cut]]
    return groups


class Read(NamedTuple):
    """An example that was drawn; where it does not count, a synthetic one in place of a row that
    cannot be trained on."""

    example: Example
    counts: bool = True


class Masked(NamedTuple):
    """A physical batch of b examples, and which of them count, (b,)."""

    inputs: Batch
    counts: Tensor


class Drawn(NamedTuple, Generic[T]):
    """A drawn unit, with secret bits of its own that decide beside whom it stands, and the places
    of those of its rows that do not count."""

    unit: T
    key: int
    missing: frozenset[int] = frozenset()


class Look(Protocol):
    """Reads rows that were drawn, as :class:`hf_dp.batches.when_drawn.WhenDrawn` does."""

    def read(self, examples: Examples, places: Sequence[int]) -> list[Read]: ...


class DrawnUnits(Dataset[Drawn[Example]]):
    """What is drawn, each with a key that is fresh in every draw: an example at the place of a row,
    or a list of examples at those of a user's. Args: look: reads rows that were not looked over."""

    def __init__(self, examples: Examples, count: int, look: Look | None = None):
        self.examples, self._count, self.look = examples, count, look

    def __len__(self) -> int:
        return self._count

    def __getitems__(self, places: Sequence[Place]) -> list[Drawn[Example]]:
        rows = [(place,) if isinstance(place, int) else place for place in places]
        found = iter(self._read([row for unit in rows for row in unit]))
        units = [[next(found) for _ in unit] for unit in rows]
        # Which row is named to the source of the keys matters only in tests.
        keys = [self.examples.randomness.example_seed(unit[0]) for unit in rows]
        drawn = []
        for place, unit, key in zip(places, units, keys, strict=True):
            examples = [example for example, _ in unit]
            missing = frozenset(at for at, read in enumerate(unit) if not read.counts)
            drawn.append(Drawn(examples[0] if isinstance(place, int) else examples, key, missing))
        return drawn

    def _read(self, rows: Sequence[int]) -> list[Read]:
        with unheard():
            if self.look is not None:
                return self.look.read(self.examples, rows)
            return [Read(example) for example in self.examples.__getitems__(rows)]

    def __getitem__(self, place: Place) -> Drawn[Example]:
        return self.__getitems__([place])[0]


@contextmanager
def unheard() -> Iterator[None]:
    """Let nothing be logged, warned of or printed meanwhile, also by libraries that are not Python:
    a row is in sight that was drawn."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            with redirect_stderr(io.StringIO()), _unprinted(1), _unprinted(2):
                yield
    finally:
        logging.disable(before)


@contextmanager
def _unprinted(descriptor: int) -> Iterator[None]:
    """Let nothing be written to a file descriptor of the process, if it is open."""
    with open(os.devnull, "wb") as nowhere:
        try:
            kept = os.dup(descriptor)
        except OSError:
            yield
            return
        os.dup2(nowhere.fileno(), descriptor)
        try:
            yield
        finally:
            os.dup2(kept, descriptor)
            os.close(kept)


def private_dataloader(
    examples: Examples,
    draws: Iterable[Sequence[Place]],
    batches: Callable[[Sequence[Drawn[Example]]], Sequence[object]],
    options: BatchOptions,
    count: int,
    look: Look | None = None,
) -> DataLoader[Drawn[Example]]:
    """Return a loader of physical batches of ``draws`` from ``count`` rows or users."""
    return DataLoader(
        DrawnUnits(examples, count, look),
        batch_sampler=draws,  # type: ignore[arg-type]
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


def shape_of(example: Example) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the shapes of all tensors of an example, by name."""
    return tuple(
        (name, tuple(leaf.shape)) for name, leaf in leaves(example) if isinstance(leaf, Tensor)
    )


def _fits(shapes: Mapping[str, tuple[int, ...]], into: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether no size is above that of the same dimension."""
    return all(
        size <= most
        for name, shape in shapes.items()
        for size, most in zip(shape, into[name], strict=True)
    )
