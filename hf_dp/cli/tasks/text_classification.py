"""Fine-tune an encoder to classify texts, privately or not: load, encode, train, evaluate, save, state epsilon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_dp.cli.config import parse, peft_config, split_config
from hf_dp.errors import ConfigError, DataError


@dataclass
class ModelArguments:
    """Which model starts."""

    model_name_or_path: str = field(
        metadata={"help": "Hub name, local folder, or package:NAME for a model inside an installed Python package."}
    )
    freeze: list[str] = field(
        default_factory=list, metadata={"help": "Prefixes of parameter names to freeze, for example bert.embeddings."}
    )


@dataclass
class DataArguments:
    """Which rows, and which of their columns."""

    dataset_name: str | None = field(default=None, metadata={"help": "`demo` for the built-in synthetic sentences."})
    train_file: str | None = field(default=None, metadata={"help": "Training rows: .parquet, .csv, .json or .jsonl."})
    validation_file: str | None = field(default=None, metadata={"help": "Evaluation rows, same columns."})
    text_columns: list[str] = field(
        default_factory=lambda: ["sentence"], metadata={"help": "One or two columns of text."}
    )
    label_column: str = field(default="label", metadata={"help": "Column of class ids or class names."})
    class_names: list[str] = field(
        default_factory=list, metadata={"help": "Class names by id; needed when the file declares none."}
    )
    max_length: int = field(default=128, metadata={"help": "Longest text, in tokens; longer ones are cut."})


def load_data(data: DataArguments) -> tuple[Any, Any, str]:
    """(training rows, evaluation rows, name for the card). Raises: ConfigError, DataError."""
    from hf_dp.tasks.demo_sentences import demo_dataset
    from hf_dp.tasks.files import load_file

    if data.dataset_name == "demo":
        splits = demo_dataset()
        return splits["train"], splits["validation"], "hf_dp demo sentences (synthetic)"
    if data.dataset_name is not None:
        raise ConfigError(
            f"Expected `dataset_name` to be 'demo', got {data.dataset_name!r}. Use train_file for your data."
        )
    if data.train_file is None or data.validation_file is None:
        raise ConfigError("Expected `train_file` and `validation_file` (or `dataset_name: demo`) to be given.")
    return load_file(data.train_file), load_file(data.validation_file), "private"


def main(argv: Sequence[str]) -> int:
    """Run the task for a configuration and command-line words; prints a summary whose last line is the output folder."""
    from hf_dp.trainer.arguments import DPTrainingArguments

    values, words = split_config(argv)
    model_args, data_args, args = parse(
        [ModelArguments, DataArguments, DPTrainingArguments], values, words, prog="hf-dp train", extra=("task", "peft")
    )
    adapter = peft_config(values.get("peft"))
    trainer = build_trainer(model_args, data_args, args, adapter)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    metrics = trainer.evaluate()
    trainer.save_model()
    if args.push_to_hub:
        trainer.push_to_hub()
    print_summary(trainer, metrics)
    trainer.end()
    return 0


def build_trainer(model_args: ModelArguments, data_args: DataArguments, args: Any, adapter: Any) -> Any:
    """A :class:`DPTrainer` for the task. Raises: DataError, ConfigError, InvalidArgumentError."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

    from hf_dp.tasks.classification import accuracy, encode, label_names
    from hf_dp.tasks.files import resolve_model
    from hf_dp.trainer.trainer import DPTrainer

    train_rows, evaluation_rows, dataset = load_data(data_args)
    names = label_names(train_rows, data_args.label_column, data_args.class_names)
    path = resolve_model(model_args.model_name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as problem:
        raise DataError(
            f"The model {model_args.model_name_or_path!r} could not be loaded: {str(problem).splitlines()[0]} "
            "Give a Hub name, a folder with config.json, weights and tokenizer, or package:NAME."
        ) from problem
    columns = (tokenizer, data_args.text_columns, data_args.label_column, names, data_args.max_length)
    train_set, evaluation_set = encode(train_rows, *columns), encode(evaluation_rows, *columns)
    set_seed(args.seed)  # the head's initial weights
    model = AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=len(names), id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)}
    )
    freeze(model, model_args.freeze)
    trainer = DPTrainer(
        model,
        args,
        train_dataset=train_set,
        eval_dataset=evaluation_set,
        processing_class=tokenizer,
        compute_metrics=accuracy(),
        peft_config=adapter,
    )
    trainer.dataset_name, trainer.base_model_name = dataset, model_args.model_name_or_path
    return trainer


def freeze(model: Any, prefixes: Sequence[str]) -> None:
    """Stop parameters whose name starts with one of ``prefixes`` from training. Raises: ConfigError for no match."""
    for prefix in prefixes:
        matched = [p for name, p in model.named_parameters() if name.startswith(prefix)]
        if not matched:
            raise ConfigError(f"`freeze` names {prefix!r}, but no parameter of the model starts with it.")
        for parameter in matched:
            parameter.requires_grad_(False)


def print_summary(trainer: Any, metrics: dict[str, float]) -> None:
    """Accuracy, epsilon by every accountant, and last the folder of checkpoint and card."""
    print()
    print(f"accuracy on the {len(trainer.eval_dataset)} evaluation rows: {metrics['eval_accuracy']:.4f}")
    if trainer.args.is_private:
        print(trainer.privacy_statement())
    print(trainer.args.output_dir)
