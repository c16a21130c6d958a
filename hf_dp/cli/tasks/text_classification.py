"""Fine-tune an encoder to classify texts, privately or not: load, encode, train, evaluate, save,
state epsilon.

With a head on top, or, with ``infilling``, by the word a masked language model puts into a
template.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_dp._validate import invalid
from hf_dp.cli.config import parse, peft_config, split_config
from hf_dp.cli.tasks.classification_data import (
    DataArguments,
    encode_all,
    load_evaluation,
    load_train,
)
from hf_dp.errors import ConfigError, DataError, HfDpError

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    """Which model starts, and how it classifies."""

    model_name_or_path: str = field(
        metadata={
            "help": "Hub name, local folder, or package:NAME for a model inside an installed "
            "Python package."
        }
    )
    infilling: str | None = field(
        default=None,
        metadata={
            "help": "Classify by filling in a word: sst2, mnli, qnli or qqp for the papers' "
            "templates; in YAML also {template: '<S1> It was [MASK] .', label_words: {negative: "
            "terrible, positive: great}}. Default: a new head.",
        },
    )
    from_scratch: bool = field(
        default=False,
        metadata={
            "help": "Start from random weights of this architecture: how much pretraining gives."
        },
    )
    freeze: list[str] = field(
        default_factory=list,
        metadata={"help": "Prefixes of parameter names to freeze, for example bert.embeddings."},
    )


def main(argv: Sequence[str]) -> int:
    """Run the task for a configuration and command-line words; prints a summary whose last line is
    the output folder."""
    from hf_dp.trainer.arguments import DPTrainingArguments

    values, words = split_config(argv)
    model_args, data_args, args = parse(
        [ModelArguments, DataArguments, DPTrainingArguments],
        values,
        words,
        prog="hf-dp train",
        extra=("task", "peft"),
    )
    adapter = peft_config(values.get("peft"))
    trainer = build_trainer(model_args, data_args, args, adapter)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    metrics = trainer.evaluate()
    trainer.save_model()
    if args.push_to_hub:
        trainer.push_to_hub()
    trainer.save_metrics("eval", trainer.evaluation_metrics(), combined=False)
    print_summary(trainer, metrics)
    trainer.end()
    return 0


def build_trainer(
    model_args: ModelArguments, data_args: DataArguments, args: Any, adapter: Any
) -> Any:
    """A :class:`DPTrainer` for the task. Raises: DataError, ConfigError, InvalidArgumentError."""
    from transformers import DataCollatorWithPadding, set_seed

    from hf_dp.tasks.classification import encode, label_names, metrics
    from hf_dp.trainer.trainer import DPTrainer

    if model_args.from_scratch and adapter is not None:
        raise ConfigError(
            "`from_scratch` does not go with `peft`: the random base of the adapter would not be "
            "saved."
        )
    train_rows, evaluation_rows = load_train(data_args), load_evaluation(data_args)
    names = label_names(train_rows, data_args.label_column, data_args.class_names)
    set_seed(args.seed)  # the head's initial weights
    model, tokenizer = load_classifier(model_args, data_args, names)
    check_positions(model, data_args.max_length)
    columns = (
        tokenizer,
        data_args.text_columns,
        data_args.label_column,
        names,
        data_args.max_length,
    )
    freeze(model, model_args.freeze)
    if adapter is not None:
        warn_of_new_weights(model)
    # In 16 bits only rows that are padded alike share a physical batch, so fewer lengths are fewer
    # batches; and products of such lengths are faster there. Never longer than max_length, which
    # the model's positions were compared with.
    multiple = 8 if args.bf16 and data_args.max_length % 8 == 0 else None
    trainer = DPTrainer(
        model,
        args,
        train_dataset=encode(train_rows, *columns),
        eval_dataset=encode_all(evaluation_rows, columns),
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple),
        processing_class=tokenizer,
        compute_metrics=metrics(data_args.metrics, len(names)),
        peft_config=adapter,
    )
    trainer.dataset_name = data_args.public_name
    trainer.base_model_name = None if model_args.from_scratch else model_args.model_name_or_path
    return trainer


def load_classifier(
    model_args: ModelArguments, data_args: DataArguments, names: Sequence[str]
) -> tuple[Any, Any]:
    """(model, tokenizer): with a new head, or infilling with its template in the tokenizer.

    Raises: DataError for what cannot be loaded, ConfigError for a template of other than
        ``text_columns``' number of texts.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    from hf_dp.tasks.files import resolve_model
    from hf_dp.tasks.infilling import load_infilling
    from hf_dp.tasks.templates import Infilling

    infilling = None if model_args.infilling is None else Infilling.of(model_args.infilling)
    if infilling is not None and infilling.template.texts != len(data_args.text_columns):
        raise ConfigError(
            f"The template {infilling.template.text!r} takes {infilling.template.texts} text "
            f"column(s), but `text_columns` names {data_args.text_columns}. Let both agree."
        )
    if model_args.from_scratch and infilling is not None:
        raise ConfigError(
            "`from_scratch` does not go with `infilling`: random weights know no words. Use a head."
        )
    path = resolve_model(model_args.model_name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        if infilling is not None:
            return load_infilling(path, tokenizer, infilling, names)
        labels = {
            "id2label": dict(enumerate(names)),
            "label2id": {name: index for index, name in enumerate(names)},
        }
        if model_args.from_scratch:
            config = AutoConfig.from_pretrained(path, num_labels=len(names), **labels)
            model = AutoModelForSequenceClassification.from_config(config)
            model.config._name_or_path = (
                ""  # it is no base of this model, and the card must not say so
            )
            return model, tokenizer
        model, info = AutoModelForSequenceClassification.from_pretrained(
            path, num_labels=len(names), output_loading_info=True, **labels
        )
        model.newly_initialized = sorted(info["missing_keys"])
        return model, tokenizer
    except HfDpError:
        raise  # says what is wrong itself, and may be a ValueError
    except (OSError, ValueError) as problem:
        raise DataError(
            f"The model {model_args.model_name_or_path!r} could not be loaded: "
            f"{str(problem).splitlines()[0]} Give a Hub name, a folder with config.json, weights "
            "and tokenizer, or package:NAME."
        ) from problem


def warn_of_new_weights(model: Any) -> None:
    """Say which random weights an adapter on this model would not hold: those of the base that its
    checkpoint lacks."""
    base = f"{model.base_model_prefix}."
    new = [name for name in getattr(model, "newly_initialized", []) if name.startswith(base)]
    if new:
        logger.warning(
            "The checkpoint of the base has no %s: they are random, and an adapter holds them only "
            "if it trains them. Others who load the adapter draw other ones. Save this model once "
            "(model.save_pretrained) and train on that, or train without `peft`.",
            ", ".join(new),
        )


def check_positions(model: Any, max_length: int) -> None:
    """Raises: InvalidArgumentError for more tokens than the model has positions.

    Found out on made-up tokens: else the first long private row that is drawn would end the run,
    and show that it is there.
    """
    import torch

    pad = getattr(model.config, "pad_token_id", None) or 0
    tokens = torch.full((1, max_length), 5 if pad != 5 else 6)
    if valid := getattr(model, "valid_input_ids", None):
        tokens = valid(tokens)
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    except (IndexError, RuntimeError) as problem:
        raise invalid(
            "max_length",
            max_length,
            "to be no more tokens than the model has positions",
            f"It fails on as many: {str(problem).splitlines()[0]}",
        ) from problem
    finally:
        model.train(training)


def freeze(model: Any, prefixes: Sequence[str]) -> None:
    """Stop parameters whose name starts with one of ``prefixes`` from training. Raises: ConfigError
    for no match."""
    for prefix in prefixes:
        matched = [p for name, p in model.named_parameters() if name.startswith(prefix)]
        if not matched:
            raise ConfigError(
                f"`freeze` names {prefix!r}, but no parameter of the model starts with it."
            )
        for parameter in matched:
            parameter.requires_grad_(False)


def metric_lines(metrics: Mapping[str, float], evaluation: Any) -> list[str]:
    """``accuracy on the 872 evaluation rows: 0.9`` for each metric of each evaluation set."""
    sets = evaluation if isinstance(evaluation, Mapping) else {"": evaluation}
    lines = []
    for name, rows in sets.items():
        prefix = f"eval_{name}_" if name else "eval_"
        found = {
            key.removeprefix(prefix): value
            for key, value in metrics.items()
            if key.startswith(prefix)
        }
        where = f"{len(rows)} {name + ' ' if name else ''}evaluation rows"
        lines += [
            f"{metric} on the {where}: {found[metric]:.4f}"
            for metric in ("accuracy", "f1")
            if metric in found
        ]
    return lines


def print_summary(trainer: Any, metrics: dict[str, float]) -> None:
    """Metrics, epsilon by every accountant, and last the folder of checkpoint and card."""
    print()
    print("\n".join(metric_lines(metrics, trainer.eval_dataset)))
    if trainer.args.is_private:
        print(trainer.privacy_statement())
    print(trainer.args.output_dir)
