"""Evaluate an image classifier that ``hf-dp train`` wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_dp.cli.tasks.classification_evaluation import load_trained, scores
from hf_dp.cli.tasks.evaluation import EvalArguments, parse_evaluation
from hf_dp.errors import ConfigError
from hf_dp.tasks.classification import ImageArguments, one_or_all
from hf_dp.tasks.classifiers import (
    ImageModelArguments,
    load_image_classifier,
    load_processor,
    require_pillow,
)
from hf_dp.tasks.models import check_pixels
from hf_dp.tasks.sources import load_evaluation

ARGUMENTS = (EvalArguments, ImageModelArguments, ImageArguments)
EXAMPLE = "hf-dp eval --config recipes/images/small_vit/frost.yaml --validation_file test.parquet"


def evaluate(
    values: dict[str, Any], words: Sequence[str], *, task: str, zero_shot: bool
) -> tuple[dict[str, float], list[str]]:
    """Return the metrics by the Trainer's names, and as lines to read.

    Args:
        values: the keys of the configuration that the classifier was trained with.
        words: the command line's, which win.
        task: image_classification.
        zero_shot: refused, because a new head knows nothing.

    Raises: ConfigError, DataError, InvalidArgumentError.
    """
    from transformers import default_data_collator

    from hf_dp.tasks.classification import metrics
    from hf_dp.tasks.images import ToPixels, check_images, image_rows
    from hf_dp.tasks.labels import label_names

    args, model_args, data_args = parse_evaluation(ARGUMENTS, values, words)
    if zero_shot:
        raise ConfigError(
            "Expected --zero-shot to be left out for images: a new classification head knows "
            "nothing before it is trained."
        )
    sets = load_evaluation(data_args)
    first = next(iter(sets.values()))
    names = label_names(first, data_args.label_column, data_args.class_names)
    require_pillow()
    path = args.trained or values.get("output_dir") or model_args.model_name_or_path
    model, processor = load_trained(
        path,
        names,
        bool(data_args.class_names),
        values.get("seed", 42),
        lambda: load_image_classifier(model_args, names),
        read,
    )
    columns = (data_args.image_column, data_args.label_column, names)
    rows = {name: image_rows(each, *columns, ToPixels(processor)) for name, each in sets.items()}
    for name, each in rows.items():
        shape = check_images(each, f"evaluation set {name!r}", data_args.image_column)
        check_pixels(model, shape)
    return scores(
        model,
        args,
        one_or_all(rows),
        keep_columns=True,
        data_collator=default_data_collator,
        compute_metrics=metrics(data_args.metrics, len(names)),
    )


def read(folder: str) -> tuple[Any, Any]:
    """Return a trained model and its image processor."""
    from transformers import AutoModelForImageClassification

    return AutoModelForImageClassification.from_pretrained(folder), load_processor(folder)
