"""Fine-tune an encoder to classify texts, privately or not, and evaluate what was trained.

The steps: load, encode, train, evaluate, save, state epsilon. The encoder gets a head, or, with
``infilling``, it classifies by the word that a masked language model puts into a template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_dp.cli.tasks.shared import (
    configured,
    describe_sources,
    evaluate_classifier,
    metric_lines,
    multiple_of,
    prepare,
    run,
)
from hf_dp.errors import ConfigError
from hf_dp.tasks.classification import DataArguments, encode, encode_all, metrics
from hf_dp.tasks.labels import label_names
from hf_dp.tasks.models import ModelArguments, check_positions, keep_class_names, load_classifier
from hf_dp.tasks.sources import load_evaluation, load_train

if TYPE_CHECKING:
    from peft import PeftConfig

    from hf_dp.trainer.arguments import DPTrainingArguments
    from hf_dp.trainer.trainer import DPTrainer

ARGUMENTS = (ModelArguments, DataArguments)


def train(values: dict[str, Any], words: Sequence[str]) -> int:
    """Run the task; print a summary whose last line is the output folder."""
    trainer = trainer_of(values, words)
    return run(trainer, lambda: metric_lines(trainer.evaluate(), trainer.eval_dataset))


def trainer_of(values: dict[str, Any], words: Sequence[str]) -> DPTrainer:
    """Return the trainer of a configuration."""
    return configured(ARGUMENTS, build_trainer, values, words)


def build_trainer(
    model_args: ModelArguments,
    data_args: DataArguments,
    args: DPTrainingArguments,
    adapter: PeftConfig | None,
) -> DPTrainer:
    """Return a :class:`DPTrainer` for the task."""
    from transformers import DataCollatorWithPadding, set_seed

    from hf_dp.trainer.trainer import DPTrainer

    with args.main_process_first(desc="loading the rows"):  # into a cache that all share
        train_rows, evaluation_rows = load_train(data_args), load_evaluation(data_args)
    names = label_names(train_rows, data_args.label_column, data_args.class_names)
    set_seed(args.seed)  # the head's initial weights
    model, tokenizer = load_classifier(model_args, data_args.text_columns, names)
    check_positions(model, data_args.max_length)
    prepare(model, model_args, args, adapter, data_args.max_length)
    if adapter is not None:
        keep_class_names(tokenizer, names)
    columns = data_args.columns(tokenizer, names, args.privacy_unit_column)
    with args.main_process_first(desc="encoding the rows"):
        train_dataset = encode(train_rows, *columns)
        eval_dataset = encode_all(evaluation_rows, columns)
    multiple = multiple_of(args, data_args.max_length)
    trainer = DPTrainer(
        model,
        args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple),
        processing_class=tokenizer,
        compute_metrics=metrics(data_args.metrics, len(names)),
        peft_config=adapter,
    )
    return describe_sources(trainer, model_args, data_args)


def evaluate(
    values: dict[str, Any], words: Sequence[str], *, zero_shot: bool
) -> tuple[dict[str, float], list[str]]:
    """Return the metrics of a classifier that ``hf-dp train`` wrote, or of its untrained base."""

    def load(model_args: ModelArguments, data: DataArguments, names: Sequence[str]) -> Any:
        if zero_shot and model_args.infilling is None:
            raise ConfigError(
                "--zero-shot needs `infilling`: a new classification head knows nothing before it "
                "is trained. Set `infilling`, or leave --zero-shot out."
            )
        return load_classifier(model_args, data.text_columns, names)

    def read(folder: str) -> Any:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        return AutoModelForSequenceClassification.from_pretrained(folder), tokenizer

    def rows_of(
        sets: Mapping[str, Any], data: DataArguments, names: Sequence[str], model: Any, reader: Any
    ) -> Any:
        return encode_all(sets, data.columns(reader, names))

    return evaluate_classifier(ARGUMENTS, values, words, load, read, rows_of, zero_shot=zero_shot)
