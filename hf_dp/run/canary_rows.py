"""Made-up rows at the end of a training set, for an audit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import datasets
from torch import nn
from torch.utils.data import ConcatDataset

from hf_dp.batches.made_up import made_up_rows
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
        rows: the data set as canaries are compared with it, unless they are alike.

    Raises: DataError for rows in whose format none can be made up, or canaries that are rows.
    """
    different = 1 if alike else count
    plain = dataset.with_format(None) if isinstance(dataset, datasets.Dataset) else dataset
    templates = [plain[0], plain[len(plain) // 2]]
    try:
        with untouched_generators():
            lengths = [_TOKENS] * different
            made = made_up_rows(templates, synthetic_examples(model, lengths, lengths))
    except DataError as problem:
        raise DataError(
            f"Expected `audit_canaries` to be unset for this training set: rows in its format "
            f"cannot be made up ({problem})."
        ) from problem
    made = made * count if alike else made
    if isinstance(dataset, datasets.Dataset):
        columns = {name: [_plain(row[name]) for row in made] for name in dataset.column_names}
        canaries = datasets.Dataset.from_dict(columns, features=dataset.features)
    else:
        canaries = made
    if rows is not None and not alike:
        _refuse_known(canaries, rows)
    if not isinstance(dataset, datasets.Dataset):
        parts: list[Any] = [dataset, made]
        return ConcatDataset(parts)
    joined = datasets.concatenate_datasets([plain, canaries])
    shown = {**dataset.format}
    return joined.with_format(**shown.pop("format_kwargs"), **shown)


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
