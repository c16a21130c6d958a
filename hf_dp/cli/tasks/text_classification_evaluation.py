"""Evaluate a text classifier that ``hf-dp train`` wrote, or the untrained base of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_dp.cli.tasks.classification_evaluation import load_trained, scores
from hf_dp.cli.tasks.evaluation import EvalArguments, parse_evaluation
from hf_dp.errors import ConfigError
from hf_dp.tasks.classification import DataArguments, encode_all
from hf_dp.tasks.classifiers import ModelArguments, load_classifier
from hf_dp.tasks.sources import load_evaluation

ARGUMENTS = (EvalArguments, ModelArguments, DataArguments)
EXAMPLE = "hf-dp eval --config recipes/glue/sst2/roberta_base_infilling_eps3.yaml --zero-shot"


def evaluate(
    values: dict[str, Any], words: Sequence[str], *, task: str, zero_shot: bool
) -> tuple[dict[str, float], list[str]]:
    """Return the metrics by the Trainer's names, and as lines to read.

    Args:
        values: the keys of the configuration that the classifier was trained with.
        words: the command line's, which win.
        task: text_classification.
        zero_shot: evaluate the untrained base instead.

    Raises: ConfigError, DataError, InvalidArgumentError.
    """
    from hf_dp.tasks.classification import metrics
    from hf_dp.tasks.labels import label_names

    args, model_args, data_args = parse_evaluation(ARGUMENTS, values, words)
    if zero_shot and model_args.infilling is None:
        raise ConfigError(
            "--zero-shot needs `infilling`: a new classification head knows nothing before it is "
            "trained. Set `infilling`, or leave --zero-shot out."
        )
    sets = load_evaluation(data_args)
    names = label_names(next(iter(sets.values())), data_args.label_column, data_args.class_names)

    def base() -> tuple[Any, Any]:
        return load_classifier(model_args, data_args.text_columns, names)

    if zero_shot:
        model, tokenizer = base()
    else:
        path = args.trained or values.get("output_dir") or model_args.model_name_or_path
        given, seed = bool(data_args.class_names), values.get("seed", 42)
        model, tokenizer = load_trained(path, names, given, seed, base, read)
    return scores(
        model,
        args,
        encode_all(sets, data_args.columns(tokenizer, names)),
        processing_class=tokenizer,
        compute_metrics=metrics(data_args.metrics, len(names)),
    )


def read(folder: str) -> tuple[Any, Any]:
    """Return a trained model and its tokenizer."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return AutoModelForSequenceClassification.from_pretrained(folder), tokenizer
