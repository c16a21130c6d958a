"""The arguments of image classification: which rows, and how their images are changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_dp.errors import ConfigError
from hf_dp.tasks.classification_data import ClassificationArguments


@dataclass
class ImageArguments(ClassificationArguments):
    """Which rows, and which of their columns."""

    demo_name = ""

    dataset_name: str | None = field(default=None, metadata={"help": "Data set on the Hub."})
    train_file: str | None = field(
        default=None,
        metadata={
            "help": "Training rows: .parquet, .csv, .json or .jsonl, or a folder with a subfolder "
            "of images for each class."
        },
    )
    image_column: str = field(
        default="image", metadata={"help": "Column of images, or of paths of image files."}
    )
    augmentation: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Random changes of training images, made anew each time: crop, flip. Default: "
            "none."
        },
    )

    def demo(self) -> Any:
        """Raise ConfigError: there are none."""
        raise ConfigError(
            "Expected `dataset_name` to be a data set on the Hub, got 'demo': hf_dp has no images "
            "of its own. Name it, or give train_file and validation_file."
        )
