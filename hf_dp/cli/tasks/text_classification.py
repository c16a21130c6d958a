"""Fine-tune an encoder to classify texts, privately or not.

The steps: load, encode, train, evaluate, save, state epsilon. The encoder gets a head, or, with
``infilling``, it classifies by the word that a masked language model puts into a template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_dp.cli.tasks.classification import configured, describe_sources, run
from hf_dp.tasks.classification import DataArguments, encode_all
from hf_dp.tasks.classifiers import ModelArguments, load_classifier
from hf_dp.tasks.models import (
    check_positions,
    freeze,
    keep_class_names,
    turn_off_dropout,
    warn_of_new_weights,
)
from hf_dp.tasks.sources import load_evaluation, load_train

ARGUMENTS = (ModelArguments, DataArguments)
EXAMPLE = (
    "hf-dp train --config recipes/sst2/minilm_dp_adam_eps3.yaml --train_file train.parquet \\\n"
    "      --validation_file dev.parquet"
)


def train(values: dict[str, Any], words: Sequence[str]) -> int:
    """Run the task; print a summary whose last line is the output folder."""
    return run(trainer_of(values, words))


def trainer_of(values: dict[str, Any], words: Sequence[str]) -> Any:
    """Return the trainer of a configuration. Raises: as :func:`build_trainer`."""
    return configured(ARGUMENTS, build_trainer, values, words)


def build_trainer(
    model_args: ModelArguments, data_args: DataArguments, args: Any, adapter: Any
) -> Any:
    """Return a :class:`DPTrainer` for the task.

    Raises: DataError, ConfigError, InvalidArgumentError.
    """
    from transformers import DataCollatorWithPadding, set_seed

    from hf_dp.tasks.classification import encode, metrics
    from hf_dp.tasks.labels import label_names
    from hf_dp.trainer.trainer import DPTrainer

    with args.main_process_first(desc="loading the rows"):  # into a cache that all share
        train_rows, evaluation_rows = load_train(data_args), load_evaluation(data_args)
    names = label_names(train_rows, data_args.label_column, data_args.class_names)
    set_seed(args.seed)  # the head's initial weights
    model, tokenizer = load_classifier(model_args, data_args.text_columns, names)
    check_positions(model, data_args.max_length)
    freeze(model, model_args.freeze)
    turn_off_dropout(model, model_args.without_dropout)
    if adapter is not None:
        warn_of_new_weights(model)
        keep_class_names(tokenizer, names)
    if args.auto_physical_batch_size and args.auto_physical_batch_length is None:
        args.auto_physical_batch_length = data_args.max_length
    columns = data_args.columns(tokenizer, names, args.privacy_unit_column)
    with args.main_process_first(desc="encoding the rows"):
        train_dataset = encode(train_rows, *columns)
        eval_dataset = encode_all(evaluation_rows, columns)
    # In 16 bits only examples that are padded alike share a physical batch, so fewer lengths give
    # fewer batches, and products of such lengths are faster there. The result is never longer than
    # max_length, which `check_positions` compared with the positions of the model.
    multiple = 8 if args.bf16 and data_args.max_length % 8 == 0 else None
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
    describe_sources(trainer, model_args, data_args)
    return trainer
