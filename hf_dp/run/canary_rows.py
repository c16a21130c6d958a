"""Made-up rows at the end of a training set, for an audit."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset

from hf_dp.batches.made_up import made_up_rows
from hf_dp.batches.structure import Example, leaves
from hf_dp.errors import DataError
from hf_dp.noise import untouched_generators
from hf_dp.overlap.compare import TrainingRows
from hf_dp.run.synthetic import synthetic_examples

_TOKENS = 12  # in a canary


def with_canaries(
    dataset: Any, model: nn.Module, count: int, *, alike: bool, rows: TrainingRows | None = None
) -> Any:
    """Return a data set and, after its rows, ``count`` made-up ones in the same format.

    Their tokens, pictures and labels are random; of the rows only names, types and shapes are read.

    Args:
        alike: whether one row serves as all canaries, which the model then never sees.
        rows: a ``datasets.Dataset`` as canaries are compared with it, unless they are alike.

    Raises: DataError for rows in whose format none can be made up, or canaries that are rows.
    """
    different = 1 if alike else count
    plain = dataset.with_format(None) if isinstance(dataset, datasets.Dataset) else dataset
    templates = [plain[0], plain[len(plain) // 2]]
    try:
        with untouched_generators():
            # Not as the global generators were seeded: rows may have been made with the same seed.
            torch.manual_seed(int.from_bytes(os.urandom(7), "little"))
            random.seed(os.urandom(16))
            np.random.seed(list(os.urandom(16)))
            lengths = [_TOKENS] * different
            made = made_up_rows(templates, synthetic_examples(model, lengths, lengths))
    except DataError as problem:
        raise DataError(
            f"Expected `audit_canaries` to be unset for this training set: rows in its format "
            f"cannot be made up ({problem})."
        ) from problem
    made = made * count if alike else made
    if not isinstance(dataset, datasets.Dataset):
        parts: list[Any] = [dataset, made]
        return ConcatDataset(parts)
    columns = {name: [_plain(row[name]) for row in made] for name in dataset.column_names}
    canaries = datasets.Dataset.from_dict(columns, features=dataset.features)
    if rows is not None and not alike:
        _refuse_known(canaries, rows)
    joined = datasets.concatenate_datasets([plain, canaries])
    shown = {**dataset.format}
    return joined.with_format(**shown.pop("format_kwargs"), **shown)


def refuse_alike(examples: Sequence[Example]) -> None:
    """Raise DataError for canaries, collated one by one, of which several are the same to a model:
    the columns that make rows differ could not be made up, and nothing would tell one from another.

    What has one number or label for a row is not compared.
    """
    seen = {
        tuple(
            (name, leaf.numpy().tobytes())
            for name, leaf in leaves(example)
            if isinstance(leaf, Tensor) and leaf.dim() > 1
        )
        for example in examples
    }
    if len(seen) < len(examples):
        raise DataError(
            f"Of {len(examples)} made-up rows only {len(seen)} differ: this training set has "
            "columns that hf_dp cannot fill. Use audit_scores='gradients', whose canaries the "
            "model does not see."
        )


def _refuse_known(canaries: Any, rows: TrainingRows) -> None:
    known = rows.compare(canaries).equal
    if known:
        raise DataError(
            f"{known} of {len(canaries)} canaries stand among the training rows already, so a coin "
            "would not decide whether they take part. Use audit_scores='gradients', whose canaries "
            "are no rows."
        )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
