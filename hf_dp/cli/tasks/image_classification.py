"""Fine-tune a vision transformer to classify images, privately or not.

The steps: load, check, train, evaluate, save, state epsilon. Images are decoded when their rows are
read, never all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_dp.cli.tasks.classification import configured, describe_sources, run
from hf_dp.tasks.classification import ImageArguments, one_or_all
from hf_dp.tasks.classifiers import (
    ImageModelArguments,
    load_image_classifier,
)
from hf_dp.tasks.models import (
    check_pixels,
    freeze,
    keep_class_names,
    turn_off_dropout,
    warn_of_new_weights,
)
from hf_dp.tasks.sources import load_evaluation, load_train

ARGUMENTS = (ImageModelArguments, ImageArguments)
EXAMPLE = (
    "hf-dp train --config recipes/images/small_vit/frost.yaml --train_file train.parquet \\\n"
    "      --validation_file test.parquet"
)


def train(values: dict[str, Any], words: Sequence[str]) -> int:
    """Run the task; print a summary whose last line is the output folder."""
    return run(trainer_of(values, words))


def trainer_of(values: dict[str, Any], words: Sequence[str]) -> Any:
    """Return the trainer of a configuration. Raises: as :func:`build_trainer`."""
    return configured(ARGUMENTS, build_trainer, values, words)


def build_trainer(
    model_args: ImageModelArguments, data_args: ImageArguments, args: Any, adapter: Any
) -> Any:
    """Return a :class:`DPTrainer` for the task.

    Evaluation images are read once, before anything is spent: one that cannot be would otherwise
    end the run after its training. Without privacy so are the training images; in a private run,
    the trainer looks over them.

    Raises: DataError, ConfigError, InvalidArgumentError, UnsupportedModelError.
    """
    from transformers import default_data_collator, set_seed

    from hf_dp.tasks.classification import metrics
    from hf_dp.tasks.images import ToPixels, check_images, image_rows
    from hf_dp.tasks.labels import label_names
    from hf_dp.trainer.trainer import DPTrainer

    with args.main_process_first(desc="loading the rows"):  # into a cache that all share
        train_rows, evaluation_rows = load_train(data_args), load_evaluation(data_args)
    names = label_names(train_rows, data_args.label_column, data_args.class_names)
    set_seed(args.seed)  # the head's initial weights
    model, processor = load_image_classifier(model_args, names)
    freeze(model, model_args.freeze)
    turn_off_dropout(model, model_args.without_dropout)
    if adapter is not None:
        warn_of_new_weights(model)
        keep_class_names(processor, names)
    plain, columns = ToPixels(processor), (data_args.image_column, data_args.label_column, names)
    keep = args.privacy_unit_column
    augmented = ToPixels(processor, data_args.augmentation)
    train_dataset = image_rows(train_rows, *columns, augmented, keep)
    sets = {name: image_rows(rows, *columns, plain, keep) for name, rows in evaluation_rows.items()}
    checked = {f"evaluation set {name!r}": rows for name, rows in sets.items()}
    if not args.is_private:
        checked["training set"] = train_dataset.with_transform(plain)
    for which, rows in checked.items():
        check_pixels(model, check_images(rows, which, data_args.image_column, args.disable_tqdm))
    args.remove_unused_columns = False  # the transform reads `image`, which the model does not take
    trainer = DPTrainer(
        model,
        args,
        train_dataset=train_dataset,
        eval_dataset=one_or_all(sets),
        data_collator=default_data_collator,
        processing_class=processor,
        compute_metrics=metrics(data_args.metrics, len(names)),
        peft_config=adapter,
    )
    describe_sources(trainer, model_args, data_args)
    return trainer
