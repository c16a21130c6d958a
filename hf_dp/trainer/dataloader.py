"""One data-loader item is one logical batch: a list of physical batches, empty for an empty draw.

The loader is not passed through ``accelerator.prepare``: its sharding hands ranks alternate logical batches, repeats the
first at the tail and drops those of unexpected size, so what would be drawn is no longer a Poisson sample.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from hf_dp.errors import DataError
from hf_dp.noise import SecretRandomness
from hf_dp.sampling import MicroBatchSampler, PoissonSampler, physical_batches

Collator = Callable[[list[Any]], Mapping[str, Any]]


class PhysicalBatchCollator:
    """Cuts one draw into physical batches of similar length and collates each with the user's collator.

    Args: one_shape: only examples that are padded alike share a physical batch. Numbers shorter than float32 round an
        example's gradient to some 2^-8 of it, and otherwise with another padded length. If that were the longest neighbour's,
        one more example could lengthen the padding of all others, and 1,024 such changes moved a sum by 1.69 C.
    Raises: DataError when a collated batch has not one row per drawn example (packing, flattening): a row would then be
        no example, and clipping rows would bound nothing. With ``one_shape``, where the padding cannot be told beforehand.
    """

    def __init__(
        self,
        collator: Collator,
        size: int,
        randomness: SecretRandomness,
        max_tokens: int | None = None,
        one_shape: bool = False,
    ):
        self.collator, self.size, self.randomness, self.max_tokens = collator, size, randomness, max_tokens
        self.one_shape = one_shape
        removing = getattr(collator, "data_collator", collator)  # transformers wraps one to remove columns
        self.multiple = getattr(removing, "pad_to_multiple_of", None) or 1

    def __call__(self, examples: Sequence[Any]) -> list[Mapping[str, Any]]:
        lengths = [length_of(example) for example in examples]
        if self.max_tokens is not None and not all(lengths):
            raise DataError(
                "max_tokens_per_physical_batch is set, but an example has no `input_ids` to count. Leave it unset for data "
                "without tokens, or remove empty rows."
            )
        shapes = [padded_shape(example, self.multiple) for example in examples] if self.one_shape else None
        groups = physical_batches(lengths, self.size, self.max_tokens, shapes)
        if get_worker_info() is not None:  # a worker's generators were seeded by the operating system
            return [self._collate([examples[i] for i in group]) for group in groups]
        with self.randomness.streams():
            return [self._collate([examples[i] for i in group]) for group in groups]

    def _collate(self, group: list[Any]) -> Mapping[str, Any]:
        batch = self.collator(group)
        check_rows(batch, len(group))
        if self.one_shape:
            self._check_padding(batch, group)
        return batch

    def _check_padding(self, batch: Mapping[str, Any], group: Sequence[Any]) -> None:
        lengths = {length_of(example) for example in group}
        tokens, mask = batch.get("input_ids"), batch.get("attention_mask")
        if lengths == {0}:  # not tokens, or not yet
            unknown = isinstance(mask, torch.Tensor) and not bool(mask.all())
        else:
            unknown = len(lengths) > 1 and isinstance(tokens, torch.Tensor) and tokens.shape[1] % self.multiple != 0
        if unknown:
            raise DataError(
                "In bfloat16 (or with frozen weights below float32) examples that are padded differently may not share a "
                "physical batch, but how far this data collator pads cannot be told from the examples. Tokenize the rows "
                "beforehand (`input_ids`), let pad_to_multiple_of be what the collator pads to, or use float32."
            )


class SecretFetch:
    """A data set whose rows are fetched on the private streams.

    A transform that draws random numbers for each row would otherwise tell, through the state of the public generators,
    how many rows were drawn, and let one row shift what all later rows get.
    """

    def __init__(self, dataset: Any, randomness: SecretRandomness):
        self.dataset, self.randomness = dataset, randomness

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if get_worker_info() is not None:
            return self._rows(indices)
        with self.randomness.streams():
            return self._rows(indices)

    def _rows(self, indices: list[int]) -> list[Any]:
        many = getattr(self.dataset, "__getitems__", None)
        return many(indices) if callable(many) else [self.dataset[index] for index in indices]


def check_rows(batch: Mapping[str, Any], examples: int) -> None:
    """Raise DataError unless every tensor of a collated batch has one row per example."""
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and (value.dim() == 0 or value.shape[0] != examples):
            raise DataError(
                f"Expected the data collator to return one row per example ({examples}), but `{name}` has shape "
                f"{tuple(value.shape)}. Packing and flattening collators mix examples in a row; use a padding one."
            )


def private_dataloader(
    dataset: Any,
    sampler: PoissonSampler | MicroBatchSampler,
    collator: Collator,
    randomness: SecretRandomness,
    args: Any,
    one_shape: bool = False,
) -> DataLoader:
    """A loader over the sampler's draws, from the run's secret source. Args: one_shape: see the collator."""
    cut = PhysicalBatchCollator(
        collator, args.per_device_train_batch_size, randomness, args.max_tokens_per_physical_batch, one_shape
    )
    sampler = dataclasses.replace(sampler, random_bytes=randomness.random_bytes)
    return DataLoader(
        SecretFetch(dataset, randomness),  # type: ignore[arg-type]
        batch_sampler=sampler,  # type: ignore[arg-type]
        collate_fn=cut,
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory and args.device.type != "cpu",
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        multiprocessing_context=args.dataloader_multiprocessing_context,
        worker_init_fn=_seed_worker_from_os,
    )


def _seed_worker_from_os(worker_id: int) -> None:
    # torch derives worker seeds from the global generator, that is from `seed`, also after a resume.
    seed = int.from_bytes(os.urandom(8), "little") >> 1
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def length_of(example: Any) -> int:
    """Tokens of an example; 0 for one without."""
    tokens = example.get("input_ids") if isinstance(example, Mapping) else None
    return len(tokens) if tokens is not None else 0


def padded_shape(example: Any, multiple: int = 1) -> tuple[tuple[object, ...], ...]:
    """The shape of each column of an example that has one, its length rounded up to ``multiple``: what padding makes of it."""
    if not isinstance(example, Mapping):
        return ()
    shapes: list[tuple[object, ...]] = []
    for name, value in sorted(example.items()):
        if hasattr(value, "__len__") and not isinstance(value, (str, bytes)):
            shape = tuple(value.shape) if hasattr(value, "shape") else (len(value),)
            shapes.append((name, *(-(-length // multiple) * multiple for length in shape[:1]), *shape[1:]))
    return tuple(shapes)
