"""Made-up rows at the end of a training set, for an audit."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset

from hf_dp.batches.made_up import made_up_rows
from hf_dp.batches.padding import LABELS
from hf_dp.errors import DataError
from hf_dp.noise import untouched_generators
from hf_dp.overlap import TrainingRows
from hf_dp.run.synthetic import synthetic_examples

_TOKENS = 12  # in a canary
_AS_TOKENS = {"token_type_ids", "special_tokens_mask"}  # 0 for each token of a plain text


def with_canaries(
    dataset: Any, model: nn.Module, count: int, *, alike: bool, rows: TrainingRows | None = None
) -> Any:
    """Return a data set and, after its rows, ``count`` made-up ones in the same format.

    Their tokens, pictures and labels are random. Of the rows names and types are read; shapes, too,
    where the model never sees what is made.

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
            contents = synthetic_examples(model, lengths, lengths)
            made = made_up_rows(templates, contents)
    except DataError as problem:
        raise DataError(
            f"Expected `audit_canaries` to be unset for this training set: rows in its format "
            f"cannot be made up ({problem})."
        ) from problem
    if not alike:
        _refuse_shapes_of_rows(templates[0], contents[0])
        # By name: whether they are as long as the tokens must not be read off the rows.
        made = [
            {**row, **{name: [0] * _TOKENS for name in _AS_TOKENS & row.keys()}} for row in made
        ]
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


def _refuse_shapes_of_rows(template: Any, made: Mapping[str, Tensor]) -> None:
    """Raise DataError for a column whose length or size a made-up row would take from a row.

    The model sees such a row in every step, so a training row would move it beyond its bound.
    """
    row = template if isinstance(template, Mapping) else {"(no columns)": template}
    for name, value in row.items():
        known = "labels" if name in LABELS else name
        fixed = value is None or isinstance(value, (bool, int, float, str))
        if not fixed and known not in made and name not in _AS_TOKENS:
            raise DataError(
                f"Expected audit_scores='gradients' for a training set with the column {name!r}: "
                "a made-up row would take its length or size from a training row, and the model "
                "would see it. Or remove the column, if the model does not read it."
            )


def _refuse_known(canaries: Any, rows: TrainingRows) -> None:
    known = len(rows.compare(canaries).equal)
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
