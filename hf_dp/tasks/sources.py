"""Load the rows of a task: from the Hub, local files or the built-in demonstration data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hf_dp.errors import ConfigError

VALIDATION = ["validation"]


@dataclass
class SourceArguments(ABC):
    """Which rows a task trains and evaluates on."""

    demo_name: ClassVar[str]

    dataset_name: str | None = field(
        default=None,
        metadata={"help": "Data set on the Hub, or `demo` for the built-in synthetic rows."},
    )
    dataset_config: str | None = field(
        default=None, metadata={"help": "Its configuration, for example sst2."}
    )
    train_split: str = field(
        default="train",
        metadata={
            "help": "Split to train on, or one part of it: train[5000:] leaves out the first 5,000 "
            "rows, also those of train_file."
        },
    )
    validation_split: list[str] = field(
        default_factory=lambda: list(VALIDATION),
        metadata={
            "help": "Splits of dataset_name to evaluate on, or without validation_file a part of "
            "train_file: train[:10%], beside train_split: train[10%:]."
        },
    )
    train_file: str | None = field(
        default=None, metadata={"help": "Training rows: .parquet, .csv, .json or .jsonl."}
    )
    validation_file: list[str] = field(
        default_factory=list, metadata={"help": "Evaluation rows, same columns."}
    )
    data_name: str | None = field(
        default=None,
        metadata={
            "help": "Public name of the data in train_file, for the card; compared with what the "
            "base has seen."
        },
    )
    max_train_rows: int | None = field(
        default=None,
        metadata={
            "help": "Train on the first rows only; N, sample rate and delta then refer to these."
        },
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
    def demo(self) -> Any:
        """Return the task's built-in rows, a data set of ``train`` and ``validation``."""


def load_train(data: SourceArguments) -> Any:
    """Return the training rows. Raises: ConfigError when none are named; DataError."""
    rows = _load_train(data)
    if data.max_train_rows is None:
        return rows
    if not 0 < data.max_train_rows <= len(rows):
        raise ConfigError(
            f"Expected `max_train_rows` to be from 1 to {len(rows)}, got {data.max_train_rows}. "
            "Leave it out to train on all rows."
        )
    return rows.select(range(data.max_train_rows))


def _load_train(data: SourceArguments) -> Any:
    from hf_dp.tasks.files import load_file, load_hub, refuse_joined

    _check_source(data)
    refuse_joined(data.train_split)
    if data.dataset_name == "demo":
        return data.demo()["train"]
    if data.dataset_name is not None:
        return load_hub(data.dataset_name, data.dataset_config, data.train_split)
    if data.train_file is None:
        raise ConfigError("Expected `train_file` (or `dataset_name`) to be given, got neither.")
    return load_file(data.train_file, data.train_split)


def load_evaluation(data: SourceArguments) -> dict[str, Any]:
    """Return the evaluation sets by name.

    The name is that of the split or file, without "validation_".

    Raises: ConfigError when none are named; DataError.
    """
    from hf_dp.tasks.files import load_file, load_hub

    _check_source(data)
    if data.dataset_name == "demo":
        return {"validation": data.demo()["validation"]}
    if data.dataset_name is not None:
        return {
            _short(split): load_hub(data.dataset_name, data.dataset_config, split)
            for split in data.validation_split
        }
    if not data.validation_file and data.train_file and data.validation_split != VALIDATION:
        return _parts_of_the_train_file(data, data.train_file)
    if not data.validation_file:
        raise ConfigError(
            "Expected `validation_file` (or `dataset_name`) to be given, got neither. To hold out "
            "a part of train_file: validation_split: train[:10%] and train_split: train[10%:]."
        )
    files = {_short(Path(file).stem): load_file(file) for file in data.validation_file}
    if len(files) < len(data.validation_file):
        raise ConfigError(
            "Expected the files of `validation_file` to have different names, got "
            f"{data.validation_file}. Rename one: the metrics are named after the files."
        )
    return files


def _parts_of_the_train_file(data: SourceArguments, file: str) -> dict[str, Any]:
    """Return parts of the file of training rows that are held out.

    Raises: ConfigError for a part that training reads, too; DataError.
    """
    from datasets import ReadInstruction

    from hf_dp.tasks.files import load_file

    held_out = {split: load_file(file, split) for split in data.validation_split}
    splits = {"train": len(load_file(file))}
    (trained,) = ReadInstruction.from_spec(data.train_split).to_absolute(splits)
    for split in held_out:
        for part in ReadInstruction.from_spec(split).to_absolute(splits):
            if max(part.from_, trained.from_) < min(part.to, trained.to):
                raise ConfigError(
                    f"Expected `validation_split` to name rows that `train_split` leaves out, got "
                    f"{split!r} and {data.train_split!r}. For a tenth, set validation_split: "
                    "train[:10%] and train_split: train[10%:]."
                )
    return {_short(split): rows for split, rows in held_out.items()}


def _check_source(data: SourceArguments) -> None:
    files = {
        "train_file": data.train_file,
        "validation_file": data.validation_file,
        "data_name": data.data_name,
    }
    given = [name for name, value in files.items() if value]
    if data.dataset_name is not None and given:
        raise ConfigError(
            f"Expected `dataset_name` or files, got dataset_name {data.dataset_name!r} and "
            f"{given}. Leave one of them out."
        )
    if data.dataset_name is None:
        _refuse_splits_of_files(data)


def _refuse_splits_of_files(data: SourceArguments) -> None:
    """Raise ConfigError for what names parts of a data set on the Hub, beside files."""
    unread: dict[str, Any] = {"dataset_config": data.dataset_config}
    if list(data.validation_split) != VALIDATION and data.validation_file:
        unread["validation_split"] = data.validation_split
    for name, value in unread.items():
        if value:
            raise ConfigError(
                f"Expected `{name}` to be unset without `dataset_name`, got {value!r}: a file of "
                "evaluation rows is read whole. Remove it, and name a file with just these rows; "
                "validation_split without validation_file holds out a part of train_file."
            )


def _short(name: str) -> str:
    return name.removeprefix("validation_")
