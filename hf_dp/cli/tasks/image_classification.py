"""Fine-tune a vision transformer to classify images, privately or not, and evaluate it.

The steps: load, check, train, evaluate, save, state epsilon. Images are decoded when their rows are
read, never all at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_dp.cli.tasks.shared import (
    configured,
    describe_sources,
    evaluate_classifier,
    metric_lines,
    prepare,
    run,
)
from hf_dp.errors import ConfigError
from hf_dp.tasks.classification import ImageArguments, metrics, one_or_all
from hf_dp.tasks.labels import label_names
from hf_dp.tasks.models import (
    ImageModelArguments,
    check_pixels,
    keep_class_names,
    load_image_classifier,
    load_processor,
    require_pillow,
)
from hf_dp.tasks.sources import load_evaluation, load_train

if TYPE_CHECKING:
    from peft import PeftConfig

    from hf_dp.trainer.arguments import DPTrainingArguments
    from hf_dp.trainer.trainer import DPTrainer

ARGUMENTS = (ImageModelArguments, ImageArguments)


def train(values: dict[str, Any], words: Sequence[str]) -> int:
    """Run the task; print a summary whose last line is the output folder."""
    trainer = trainer_of(values, words)
    return run(trainer, lambda: metric_lines(trainer.evaluate(), trainer.eval_dataset))


def trainer_of(values: dict[str, Any], words: Sequence[str]) -> DPTrainer:
    """Return the trainer of a configuration."""
    return configured(ARGUMENTS, build_trainer, values, words)


def build_trainer(
    model_args: ImageModelArguments,
    data_args: ImageArguments,
    args: DPTrainingArguments,
    adapter: PeftConfig | None,
) -> DPTrainer:
    """Return a :class:`DPTrainer` for the task.

    Evaluation images are read once, before anything is spent: one that cannot be would otherwise
    end the run after its training. Without privacy so are the training images; in a private run,
    the trainer looks over them.
    """
    from transformers import default_data_collator, set_seed

    from hf_dp.tasks.images import ToPixels, check_images, image_rows
    from hf_dp.trainer.trainer import DPTrainer

    with args.main_process_first(desc="loading the rows"):  # into a cache that all share
        train_rows, evaluation_rows = load_train(data_args), load_evaluation(data_args)
    names = label_names(train_rows, data_args.label_column, data_args.class_names)
    set_seed(args.seed)  # the head's initial weights
    model, processor = load_image_classifier(model_args, names)
    prepare(model, model_args, args, adapter)
    if adapter is not None:
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
    return describe_sources(trainer, model_args, data_args)


def evaluate(
    values: dict[str, Any], words: Sequence[str], *, zero_shot: bool
) -> tuple[dict[str, float], list[str]]:
    """Return the metrics of a classifier that ``hf-dp train`` wrote.

    Args: zero_shot: refused, because a new head knows nothing.
    """
    if zero_shot:
        raise ConfigError(
            "Expected --zero-shot to be left out for images: a new classification head knows "
            "nothing before it is trained."
        )

    def load(model_args: ImageModelArguments, data: ImageArguments, names: Sequence[str]) -> Any:
        return load_image_classifier(model_args, names)

    def read(folder: str) -> Any:
        from transformers import AutoModelForImageClassification

        require_pillow()
        return AutoModelForImageClassification.from_pretrained(folder), load_processor(folder)

    def rows_of(
        sets: Mapping[str, Any], data: ImageArguments, names: Sequence[str], model: Any, reader: Any
    ) -> Any:
        from hf_dp.tasks.images import ToPixels, check_images, image_rows

        columns = (data.image_column, data.label_column, names, ToPixels(reader))
        rows = {name: image_rows(each, *columns) for name, each in sets.items()}
        for name, each in rows.items():
            shape = check_images(each, f"evaluation set {name!r}", data.image_column)
            check_pixels(model, shape)
        return one_or_all(rows)

    keep = {"remove_unused_columns": False}  # the transform of the rows needs them
    return evaluate_classifier(ARGUMENTS, values, words, load, read, rows_of, **keep)
