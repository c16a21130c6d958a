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

    Raises: DataError when a collated batch has not one row per drawn example (packing, flattening): a row would then be
        no example, and clipping rows would bound nothing.
    """

    def __init__(self, collator: Collator, size: int, randomness: SecretRandomness, max_tokens: int | None = None):
        self.collator, self.size, self.randomness, self.max_tokens = collator, size, randomness, max_tokens

    def __call__(self, examples: Sequence[Any]) -> list[Mapping[str, Any]]:
        lengths = [length_of(example) for example in examples]
        if self.max_tokens is not None and not all(lengths):
            raise DataError(
                "max_tokens_per_physical_batch is set, but an example has no `input_ids` to count. Leave it unset for data "
                "without tokens, or remove empty rows."
            )
        groups = physical_batches(lengths, self.size, self.max_tokens)
        if get_worker_info() is not None:  # a worker's generators were seeded by the operating system
            return [self._collate([examples[i] for i in group]) for group in groups]
        with self.randomness.streams():
            return [self._collate([examples[i] for i in group]) for group in groups]

    def _collate(self, group: list[Any]) -> Mapping[str, Any]:
        batch = self.collator(group)
        check_rows(batch, len(group))
        return batch


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
) -> DataLoader:
    """A loader over the sampler's draws, from the run's secret source."""
    cut = PhysicalBatchCollator(
        collator, args.per_device_train_batch_size, randomness, args.max_tokens_per_physical_batch
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
