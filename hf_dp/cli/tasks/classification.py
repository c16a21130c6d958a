"""Fine-tune a model to classify texts or images, privately or not, and evaluate the result.

A language model gets a head, or, with ``infilling``, it classifies by the word that it puts into a
template. Images are decoded when their rows are read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hf_dp.cli import tasks
from hf_dp.errors import ConfigError, DataError
from hf_dp.tasks import models
from hf_dp.tasks.classification import (
    ClassificationArguments,
    DataArguments,
    EncodeWhenDrawn,
    ImageArguments,
    checked_names,
    encode,
    label_names,
    metrics,
    one_or_all,
    word_lines,
)
from hf_dp.tasks.sources import load_evaluation, load_stream, load_train

if TYPE_CHECKING:
    from datasets import Dataset
    from peft import PeftConfig
    from transformers import (
        BaseImageProcessor,
        EvalPrediction,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

    from hf_dp.cli.config import Recipe
    from hf_dp.streams.reading import Stream
    from hf_dp.trainer.arguments import DPTrainingArguments
    from hf_dp.trainer.trainer import DPTrainer

_TIMINGS = ("_runtime", "_per_second", "_preparation_time", "_loss")


class Classifier(ABC):
    """A classifier as a configuration says: its model, its reader (a tokenizer or an image
    processor), its classes in the order of their ids, and which rows it is for."""

    model: PreTrainedModel
    reader: PreTrainedTokenizerBase | BaseImageProcessor

    def __init__(
        self, start: models.StartArguments, data: ClassificationArguments, names: Sequence[str]
    ) -> None:
        self.start, self.data, self.names = start, data, names

    @abstractmethod
    def load(self) -> None:
        """Load the model that the configuration names, and its reader."""

    @abstractmethod
    def read(self, folder: str) -> None:
        """Load a whole trained model, and its reader."""

    @abstractmethod
    def rows(
        self, rows: Dataset, args: DPTrainingArguments | None, evaluation: str = ""
    ) -> Dataset:
        """Return rows of training, or of the set ``evaluation``, as the Trainer takes them."""

    @abstractmethod
    def collator(
        self, args: DPTrainingArguments, stream: Stream | None
    ) -> Callable[..., dict[str, Any]]:
        """Return what makes a batch of rows, of a stream's as they are."""

    def evaluation_rows(
        self, sets: Mapping[str, Dataset], args: DPTrainingArguments | None = None
    ) -> Dataset | dict[str, Dataset]:
        """Return the evaluation sets as the Trainer takes them."""
        return one_or_all({name: self.rows(rows, args, name) for name, rows in sets.items()})

    def read_trained(self, path: str, seed: int) -> None:
        """Load what ``hf-dp train`` wrote to a folder. The classes of an adapter whose folder does
        not say them are those of the configuration."""
        from transformers import set_seed

        from hf_dp.tasks.sources import loading, resolve_model

        folder = resolve_model(path)
        advice = "Train it first (hf-dp train), or give its folder or Hub name: --trained NAME."
        with loading(f"The classifier {path!r}", advice):
            if not Path(folder, "adapter_config.json").exists():
                self.read(folder)
                known = self.model.config.id2label or {}
                self._check(path, [name for _, name in sorted(known.items())])
                return
            from peft import PeftModel

            kept = models.kept_class_names(folder)
            if kept is None and not self.data.class_names:
                raise ConfigError(
                    f"The adapter {Path(folder).name!r} does not say which classes it was trained "
                    f"with, but the data declares {list(self.names)}. Set `class_names`."
                )
            self._check(path, kept or self.names)
            set_seed(seed)  # initializes what the base's checkpoint lacks, as in training
            self.load()
            self.model = cast("PreTrainedModel", PeftModel.from_pretrained(self.model, folder))

    def _check(self, path: str, known: Sequence[str]) -> None:
        if list(known) != list(self.names):
            raise ConfigError(
                f"The classifier {path!r} has the classes {list(known)}, and the data "
                f"{list(self.names)}. If these are the same, set `class_names` to the former."
            )


class Texts(Classifier):
    """A classifier of texts."""

    start: models.ModelArguments
    data: DataArguments
    reader: PreTrainedTokenizerBase

    def load(self) -> None:
        self.model, self.reader = models.load_classifier(
            self.start, self.data.text_columns, self.names
        )
        models.check_positions(self.model, self.data.max_length)

    def read(self, folder: str) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        from hf_dp.tasks.infilling import load_trained

        if (infills := load_trained(folder)) is not None:
            self.model, self.reader = infills
            return
        self.reader = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForSequenceClassification.from_pretrained(folder)

    def rows(
        self, rows: Dataset, args: DPTrainingArguments | None, evaluation: str = ""
    ) -> Dataset:
        data, keep = self.data, args.privacy_unit_column if args else None
        columns = data.text_columns, data.label_column
        try:
            return encode(rows, self.reader, *columns, self.names, data.max_length, keep)
        except DataError as problem:
            if not evaluation:
                raise
            raise DataError(f"Evaluation set {evaluation!r}: {problem}") from problem

    def collator(
        self, args: DPTrainingArguments, stream: Stream | None
    ) -> Callable[..., dict[str, Any]]:
        from transformers import DataCollatorWithPadding

        pad = DataCollatorWithPadding(self.reader)
        if stream is None:
            return pad
        args.remove_unused_columns = False  # texts are read when they are drawn
        declared = getattr(stream.first.features[self.data.label_column], "names", None)
        return EncodeWhenDrawn(self.reader, self.data, self.names, declared, pad)


class Images(Classifier):
    """A classifier of images. Evaluation images are read once, before anything is spent: one that
    cannot be would otherwise end the run after its training."""

    start: models.ImageModelArguments
    data: ImageArguments
    reader: BaseImageProcessor

    def load(self) -> None:
        from hf_dp.tasks.images import load_image_classifier

        self.model, self.reader = load_image_classifier(self.start, self.names)

    def read(self, folder: str) -> None:
        from transformers import AutoModelForImageClassification

        from hf_dp.tasks.images import load_processor, require_pillow

        require_pillow()
        self.reader = load_processor(folder)
        self.model = AutoModelForImageClassification.from_pretrained(folder)

    def rows(
        self, rows: Dataset, args: DPTrainingArguments | None, evaluation: str = ""
    ) -> Dataset:
        from hf_dp.tasks.images import ToPixels, check_images, check_pixels, image_rows

        data, keep = self.data, args.privacy_unit_column if args else None
        columns = data.image_column, data.label_column
        found = image_rows(rows, *columns, self.names, ToPixels(self.reader), keep)
        if evaluation or args is None or not args.is_private:
            which = f"evaluation set {evaluation!r}" if evaluation else "training set"
            quiet = args is not None and bool(args.disable_tqdm)
            check_pixels(self.model, check_images(found, which, data.image_column, quiet))
        changed = ToPixels(self.reader, data.augmentation)
        return found if evaluation else found.with_transform(changed)

    def collator(
        self, args: DPTrainingArguments, stream: Stream | None
    ) -> Callable[..., dict[str, Any]]:
        from transformers import default_data_collator

        args.remove_unused_columns = False  # the transform reads a column that no model takes
        return default_data_collator


class Classification(tasks.PrivateTask):
    """The task of such a classifier."""

    def __init__(self, kind: type[Classifier], *arguments: type) -> None:
        self.kind, self.ARGUMENTS = kind, arguments

    def build_trainer(
        self,
        start: models.StartArguments,
        data: ClassificationArguments,
        args: DPTrainingArguments,
        adapter: PeftConfig | None,
    ) -> tuple[DPTrainer, tasks.Evaluate]:
        """Return a :class:`DPTrainer` for the task, and what evaluates it."""
        from transformers import set_seed

        from hf_dp.trainer.trainer import DPTrainer

        stream = load_stream(data) if self.kind is Texts else None
        with args.main_process_first(desc="loading the rows"):  # into a cache that all share
            rows = load_train(data) if stream is None else stream.first
            evaluation = load_evaluation(data)
        sets = {"training rows": rows} | {f"{name} rows": each for name, each in evaluation.items()}
        columns = getattr(data, "text_columns", ())
        names = checked_names(sets, columns, data.label_column, data.class_names)
        set_seed(args.seed)  # the head's initial weights
        made = self.kind(start, data, names)
        made.load()
        tasks.prepare(made.model, start, args, adapter, getattr(data, "max_length", None))
        if adapter is not None:
            models.keep_class_names(made.reader, names)
        with args.main_process_first(desc="encoding the rows"):
            train_dataset = made.rows(rows, args) if stream is None else stream
            eval_dataset = made.evaluation_rows(evaluation, args)
        trainer = DPTrainer(
            made.model,
            args,
            made.collator(args, stream),
            train_dataset,
            eval_dataset,
            made.reader,
            compute_metrics=metrics(data.metrics, len(names)),
            peft_config=adapter,
        )
        tasks.describe_sources(trainer, start, data)
        return trainer, lambda: tasks.metric_lines(trainer.evaluate(), trainer.eval_dataset)

    def evaluate(
        self, values: Recipe, words: Sequence[str], *, zero_shot: bool
    ) -> tuple[dict[str, float], list[str]]:
        """Return the metrics of a classifier that was trained, or of its untrained base."""
        import torch
        from transformers import Trainer, TrainingArguments

        from hf_dp.losses import each_row_read_as_alone

        args, start, data = tasks.parse_evaluation(
            (tasks.EvalArguments, *self.ARGUMENTS), values, words
        )
        if zero_shot and getattr(start, "infilling", None) is None:
            raise ConfigError(
                "--zero-shot needs `infilling`: a new classification head knows nothing before it "
                "is trained. Set `infilling` (of texts), or leave --zero-shot out."
            )
        sets = load_evaluation(data)
        names = label_names(next(iter(sets.values())), data.label_column, data.class_names)
        made = self.kind(start, data, names)
        if zero_shot:
            made.load()
        else:
            path = args.place(values) or start.model_name_or_path
            seed = values.get("seed")
            made.read_trained(path, 42 if seed is None else seed)
        measure, words = metrics(data.metrics, len(names)), list[str]()

        def compute(prediction: EvalPrediction) -> dict[str, float]:
            words.extend(word_lines(prediction, names))
            return measure(prediction)

        trainer = Trainer(
            made.model,
            TrainingArguments(
                per_device_eval_batch_size=args.per_device_eval_batch_size,
                use_cpu=args.use_cpu,
                dataloader_pin_memory=torch.cuda.is_available(),
                report_to="none",
                remove_unused_columns=not isinstance(data, ImageArguments),  # as when training
            ),
            eval_dataset=made.evaluation_rows(sets),
            processing_class=made.reader,
            compute_metrics=compute if zero_shot else measure,
        )
        with each_row_read_as_alone(made.model):
            found = trainer.evaluate()
        kept = {k: v for k, v in found.items() if k != "epoch" and not k.endswith(_TIMINGS)}
        return kept, [*tasks.metric_lines(found, trainer.eval_dataset), *words]


TEXTS = Classification(Texts, models.ModelArguments, DataArguments)
IMAGES = Classification(Images, models.ImageModelArguments, ImageArguments)
