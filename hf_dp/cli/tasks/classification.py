"""Fine-tune an encoder to classify texts or images, privately or not, and evaluate the result.

The steps: load, encode, train, evaluate, save, state epsilon. An encoder of texts gets a head, or,
with ``infilling``, it classifies by the word that a masked language model puts into a template.
Images are decoded when their rows are read, never all at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_dp.cli.tasks.shared import (
    EvalArguments,
    configured,
    describe_sources,
    metric_lines,
    multiple_of,
    parse_evaluation,
    prepare,
    run,
)
from hf_dp.errors import ConfigError
from hf_dp.tasks.classification import (
    ClassificationArguments,
    DataArguments,
    ImageArguments,
    encode,
    encode_all,
    metrics,
    one_or_all,
)
from hf_dp.tasks.labels import checked_names, label_names
from hf_dp.tasks.models import (
    ImageModelArguments,
    ModelArguments,
    check_pixels,
    check_positions,
    keep_class_names,
    kept_class_names,
    load_classifier,
    load_image_classifier,
    load_processor,
    require_pillow,
)
from hf_dp.tasks.sources import load_evaluation, load_train

if TYPE_CHECKING:
    from peft import PeftConfig

    from hf_dp.tasks.models import StartArguments
    from hf_dp.trainer.arguments import DPTrainingArguments
    from hf_dp.trainer.trainer import DPTrainer

TRAINING = "training set"
_TIMINGS = ("_runtime", "_per_second", "_preparation_time", "_loss")


class Classification(ABC):
    """What the tasks share. A *reader* is a tokenizer or an image processor, *names* are the
    classes in the order of their ids.

    Attributes: ARGUMENTS: the dataclasses of the model, and of the rows.
    """

    ARGUMENTS: tuple[type[StartArguments], type[ClassificationArguments]]

    @abstractmethod
    def load(self, model_args: Any, data: Any, names: Sequence[str]) -> tuple[Any, Any]:
        """Return the model that a configuration names, and its reader."""

    @abstractmethod
    def read(self, folder: str) -> tuple[Any, Any]:
        """Return a whole trained model, and its reader."""

    @abstractmethod
    def rows(
        self, sets: Mapping[str, Any], data: Any, names: Sequence[str], parts: tuple[Any, Any],
        args: DPTrainingArguments | None = None,
    ) -> Any:  # fmt: skip
        """Return sets of rows as the Trainer takes them.

        Args: sets: by name, or the training rows as :data:`TRAINING`. parts: model and reader.
        """

    @abstractmethod
    def options(self, reader: Any, data: Any, args: DPTrainingArguments) -> dict[str, Any]:
        """Return further arguments of the trainer."""

    def train(self, values: dict[str, Any], words: Sequence[str]) -> int:
        """Run the task; print a summary whose last line is the output folder."""
        trainer = self.trainer_of(values, words)
        return run(trainer, lambda: metric_lines(trainer.evaluate(), trainer.eval_dataset))

    def trainer_of(self, values: dict[str, Any], words: Sequence[str]) -> DPTrainer:
        """Return the trainer of a configuration."""
        return configured(self.ARGUMENTS, self.build_trainer, values, words)

    def build_trainer(
        self,
        model_args: StartArguments,
        data: ClassificationArguments,
        args: DPTrainingArguments,
        adapter: PeftConfig | None,
    ) -> DPTrainer:
        """Return a :class:`DPTrainer` for the task."""
        from transformers import set_seed

        from hf_dp.trainer.trainer import DPTrainer

        with args.main_process_first(desc="loading the rows"):  # into a cache that all share
            rows, evaluation = load_train(data), load_evaluation(data)
        sets = {"training rows": rows} | {f"{name} rows": each for name, each in evaluation.items()}
        columns = getattr(data, "text_columns", ())
        names = checked_names(sets, columns, data.label_column, data.class_names)
        set_seed(args.seed)  # the head's initial weights
        model, reader = self.load(model_args, data, names)
        prepare(model, model_args, args, adapter, getattr(data, "max_length", None))
        if adapter is not None:
            keep_class_names(reader, names)
        with args.main_process_first(desc="encoding the rows"):
            how = (data, names, (model, reader), args)
            train_dataset, eval_dataset = (
                self.rows({TRAINING: rows}, *how),
                self.rows(evaluation, *how),
            )
        trainer = DPTrainer(
            model,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=reader,
            compute_metrics=metrics(data.metrics, len(names)),
            peft_config=adapter,
            **self.options(reader, data, args),
        )
        return describe_sources(trainer, model_args, data)

    def evaluate(
        self, values: dict[str, Any], words: Sequence[str], *, zero_shot: bool
    ) -> tuple[dict[str, float], list[str]]:
        """Return the metrics of a classifier that ``hf-dp train`` wrote, or of its untrained base.

        Raises: DataError for what cannot be loaded; ConfigError for one with other classes.
        """
        from transformers import Trainer, TrainingArguments

        args, model_args, data = parse_evaluation((EvalArguments, *self.ARGUMENTS), values, words)
        if zero_shot and getattr(model_args, "infilling", None) is None:
            raise ConfigError(
                "--zero-shot needs `infilling`: a new classification head knows nothing before it "
                "is trained. Set `infilling` (of texts), or leave --zero-shot out."
            )
        sets = load_evaluation(data)
        names = label_names(next(iter(sets.values())), data.label_column, data.class_names)
        path = args.trained or values.get("output_dir") or model_args.model_name_or_path
        if zero_shot:
            model, reader = self.load(model_args, data, names)
        else:
            model, reader = self._trained(path, model_args, data, names, values.get("seed", 42))
        trainer = Trainer(
            model,
            TrainingArguments(
                per_device_eval_batch_size=args.per_device_eval_batch_size,
                use_cpu=args.use_cpu,
                report_to="none",
                remove_unused_columns=not isinstance(data, ImageArguments),  # as when training
            ),
            eval_dataset=self.rows(sets, data, names, (model, reader)),
            processing_class=reader,
            compute_metrics=metrics(data.metrics, len(names)),
        )
        found = trainer.evaluate()
        kept = {k: v for k, v in found.items() if k != "epoch" and not k.endswith(_TIMINGS)}
        return kept, metric_lines(found, trainer.eval_dataset)

    def _trained(
        self, path: str, model_args: Any, data: Any, names: Sequence[str], seed: int
    ) -> tuple[Any, Any]:
        """Return the model that ``hf-dp train`` wrote to a folder, and its reader.

        The classes of an adapter whose folder does not say them are those of the configuration: an
        evaluation file may declare others, or these in another order.
        """
        from transformers import set_seed

        from hf_dp.tasks.sources import loading, resolve_model

        folder = resolve_model(path)
        advice = "Train it first (hf-dp train), or give its folder or Hub name: --trained NAME."
        with loading(f"The classifier {path!r}", advice):
            if not Path(folder, "adapter_config.json").exists():
                model, reader = self.read(folder)
                count = model.config.num_labels
                _check_classes(path, [model.config.id2label[each] for each in range(count)], names)
                return model, reader
            from peft import PeftModel

            kept = kept_class_names(folder)
            if kept is None and not data.class_names:
                raise ConfigError(
                    f"The adapter {Path(folder).name!r} does not say which classes it was trained "
                    f"with, and the data declares {list(names)}. Set `class_names` to those of its "
                    "training, in the order of their ids then."
                )
            _check_classes(path, kept or names, names)
            set_seed(seed)  # initializes what the base's checkpoint lacks, as in training
            base, reader = self.load(model_args, data, names)
            return PeftModel.from_pretrained(base, folder), reader


def _check_classes(path: str, known: Sequence[str], names: Sequence[str]) -> None:
    if list(known) != list(names):
        raise ConfigError(
            f"The classifier {path!r} has the classes {list(known)}, and the data {list(names)}. "
            f"Evaluate on data with the same classes; set `class_names` to {list(known)} where it "
            "declares the same in another order."
        )


class Texts(Classification):
    """Classify texts."""

    ARGUMENTS = (ModelArguments, DataArguments)

    def load(self, model_args: Any, data: Any, names: Sequence[str]) -> tuple[Any, Any]:
        model, tokenizer = load_classifier(model_args, data.text_columns, names)
        check_positions(model, data.max_length)
        return model, tokenizer

    def read(self, folder: str) -> tuple[Any, Any]:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        return AutoModelForSequenceClassification.from_pretrained(folder), tokenizer

    def rows(
        self, sets: Mapping[str, Any], data: Any, names: Sequence[str], parts: tuple[Any, Any],
        args: DPTrainingArguments | None = None,
    ) -> Any:  # fmt: skip
        keep = None if args is None else args.privacy_unit_column
        columns = data.columns(parts[1], names, keep)
        training = sets.get(TRAINING)
        return encode_all(sets, columns) if training is None else encode(training, *columns)

    def options(self, reader: Any, data: Any, args: DPTrainingArguments) -> dict[str, Any]:
        from transformers import DataCollatorWithPadding

        multiple = multiple_of(args, data.max_length)
        return {"data_collator": DataCollatorWithPadding(reader, pad_to_multiple_of=multiple)}


class Images(Classification):
    """Classify images.

    Evaluation images are read once, before anything is spent: one that cannot be would otherwise
    end the run after its training. The trainer looks over those of a private run.
    """

    ARGUMENTS = (ImageModelArguments, ImageArguments)

    def load(self, model_args: Any, data: Any, names: Sequence[str]) -> tuple[Any, Any]:
        return load_image_classifier(model_args, names)

    def read(self, folder: str) -> tuple[Any, Any]:
        from transformers import AutoModelForImageClassification

        require_pillow()
        return AutoModelForImageClassification.from_pretrained(folder), load_processor(folder)

    def rows(
        self, sets: Mapping[str, Any], data: Any, names: Sequence[str], parts: tuple[Any, Any],
        args: DPTrainingArguments | None = None,
    ) -> Any:  # fmt: skip
        from hf_dp.tasks.images import ToPixels, check_images, image_rows

        model, reader = parts
        keep = None if args is None else args.privacy_unit_column
        columns = (data.image_column, data.label_column, names, ToPixels(reader), keep)
        found = {}
        for name, rows in sets.items():
            training = name == TRAINING
            found[name] = plain = image_rows(rows, *columns)
            if not (training and args is not None and args.is_private):
                which = name if training else f"evaluation set {name!r}"
                quiet = args is not None and bool(args.disable_tqdm)
                check_pixels(model, check_images(plain, which, data.image_column, quiet))
            if training:
                found[name] = plain.with_transform(ToPixels(reader, data.augmentation))
        return one_or_all(found)

    def options(self, reader: Any, data: Any, args: DPTrainingArguments) -> dict[str, Any]:
        from transformers import default_data_collator

        args.remove_unused_columns = False  # the transform reads a column that no model takes
        return {"data_collator": default_data_collator}


TEXTS, IMAGES = Texts(), Images()
