"""Load the rows of a task: from the Hub, local files or the built-in demonstration data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hf_dp._arguments import argument
from hf_dp.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

VALIDATION = ["validation"]
_HOLD_OUT = (
    "To hold out a tenth of train_file, set validation_split: train[:10%] and train_split: "
    "train[10%:]."
)


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
        "Splits of dataset_name to evaluate on, or without validation_file a part of "
        "train_file: train[:10%], beside train_split: train[10%:].",
    )
    train_file: str | None = argument(None, "Training rows: .parquet, .csv, .json or .jsonl.")
    validation_file: list[str] = argument([], "Evaluation rows, same columns.")
    data_name: str | None = argument(
        None,
        "Public name of the data in train_file, for the card; compared with what the "
        "base has seen.",
    )
    max_train_rows: int | None = argument(
        None, "Train on the first rows only; N, sample rate and delta then refer to these."
    )

    @property
    def public_name(self) -> str:
        """Return the training data's name for the card."""
        if self.dataset_name == "demo":
            return self.demo_name
        if self.dataset_name:
            return "/".join(filter(None, [self.dataset_name, self.dataset_config]))
        return self.data_name or "private"

    @abstractmethod
    def demo(self) -> DatasetDict:
        """Return the task's built-in rows, a data set of ``train`` and ``validation``."""


def load_train(data: SourceArguments) -> Dataset:
    """Return the training rows. Raises: ConfigError when none are named; DataError."""
    from hf_dp.tasks.files import load_file, load_hub, refuse_joined

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
    if data.max_train_rows is None:
        return rows
    if not 0 < data.max_train_rows <= len(rows):
        raise ConfigError(
            f"Expected `max_train_rows` to be from 1 to {len(rows)}, got {data.max_train_rows}. "
            "Leave it out to train on all rows."
        )
    return rows.select(range(data.max_train_rows))


def load_evaluation(data: SourceArguments) -> dict[str, Dataset]:
    """Return the evaluation sets by name, that of the split or file without "validation_".

    Raises: ConfigError when none are named, or for a part that training reads, too; DataError.
    """
    from hf_dp.tasks.files import load_file, load_hub

    _check_source(data)
    name, config, file = data.dataset_name, data.dataset_config, data.train_file
    if name == "demo":
        found = {"validation": data.demo()["validation"]}
    elif name is not None:
        found = {split: load_hub(name, config, split) for split in data.validation_split}
    elif data.validation_file:
        found = {Path(file).stem: load_file(file) for file in data.validation_file}
        if len(found) < len(data.validation_file):
            raise ConfigError(
                "Expected the files of `validation_file` to have different names, got "
                f"{data.validation_file}. Rename one: the metrics are named after the files."
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
    for split in data.validation_split:
        for part in ReadInstruction.from_spec(split).to_absolute({"train": rows}):
            if max(part.from_, trained.from_) < min(part.to, trained.to):
                raise ConfigError(
                    f"Expected `validation_split` to name rows that `train_split` leaves out, got "
                    f"{split!r} and {data.train_split!r}. {_HOLD_OUT}"
                )


def _check_source(data: SourceArguments) -> None:
    """Raise ConfigError for files beside a data set of the Hub, and for its parts beside files."""
    if data.dataset_name is not None:
        unread = ["train_file", "validation_file", "data_name"]
    elif data.validation_file and data.validation_split != VALIDATION:
        unread = ["dataset_config", "validation_split"]  # the file is read whole
    else:
        unread = ["dataset_config"]
    given = {name: value for name in unread if (value := getattr(data, name))}
    if given:
        other = "with" if data.dataset_name is not None else "without"
        name, value = next(iter(given.items()))
        raise ConfigError(
            f"Expected `{name}` to be unset {other} `dataset_name`, got {value!r}. Remove it. "
            f"{_HOLD_OUT}"
        )
