"""Evaluate a text classifier that ``hf-dp train`` wrote, or the untrained base of one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_dp.cli.summary import metric_lines
from hf_dp.cli.tasks.evaluation import EvalArguments, parse_evaluation
from hf_dp.errors import ConfigError
from hf_dp.tasks.classification_data import DataArguments, encode_all
from hf_dp.tasks.sources import load_evaluation
from hf_dp.tasks.text_classifier import ModelArguments, load_classifier

_TIMINGS = ("_runtime", "_per_second", "_preparation_time", "_loss")


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
    from transformers import Trainer, TrainingArguments

    from hf_dp.tasks.classification import label_names, metrics

    args, model_args, data_args = parse_evaluation(ARGUMENTS, values, words)
    if zero_shot and model_args.infilling is None:
        raise ConfigError(
            "--zero-shot needs `infilling`: a new classification head knows nothing before it is "
            "trained. Set `infilling`, or leave --zero-shot out."
        )
    sets = load_evaluation(data_args)
    names = label_names(next(iter(sets.values())), data_args.label_column, data_args.class_names)
    if zero_shot:
        model, tokenizer = load_classifier(model_args, data_args.text_columns, names)
    else:
        path = args.trained or values.get("output_dir") or model_args.model_name_or_path
        model, tokenizer = load_trained(path, model_args, data_args, names, values.get("seed", 42))
    trainer = Trainer(
        model,
        TrainingArguments(
            per_device_eval_batch_size=args.per_device_eval_batch_size,
            use_cpu=args.use_cpu,
            report_to="none",
        ),
        eval_dataset=encode_all(sets, data_args.columns(tokenizer, names)),
        processing_class=tokenizer,
        compute_metrics=metrics(data_args.metrics, len(names)),
    )
    found = trainer.evaluate()
    kept = {
        name: value
        for name, value in found.items()
        if name != "epoch" and not name.endswith(_TIMINGS)
    }
    return kept, metric_lines(found, trainer.eval_dataset)


def load_trained(
    path: str,
    model_args: ModelArguments,
    data_args: DataArguments,
    names: Sequence[str],
    seed: int = 42,
) -> tuple[Any, Any]:
    """Return model and tokenizer that ``hf-dp train`` wrote.

    An adapter is put onto the base that the configuration names.

    Args:
        names: the classes of the data, in the order of their ids.
        seed: the seed of the training; the default is that of TrainingArguments.

    Raises: ConfigError when the classifier cannot be loaded, or has other classes.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

    from hf_dp.tasks.files import resolve_model

    folder = resolve_model(path)
    try:
        if Path(folder, "adapter_config.json").exists():
            from peft import PeftModel

            set_seed(seed)  # initializes what the base's checkpoint lacks, as in training
            base, tokenizer = load_classifier(model_args, data_args.text_columns, names)
            return PeftModel.from_pretrained(base, folder), tokenizer
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForSequenceClassification.from_pretrained(folder)
    except (OSError, ValueError, RuntimeError) as problem:
        raise ConfigError(
            f"The classifier {path!r} could not be loaded: {str(problem).splitlines()[0]} Train it "
            "first (hf-dp train), or give its folder or Hub name: --trained NAME."
        ) from problem
    known = [model.config.id2label[index] for index in range(model.config.num_labels)]
    if known != list(names):
        raise ConfigError(
            f"The classifier {path!r} has the classes {known}, and the data {list(names)}. "
            "Evaluate on data with the same classes in the same order, or set `class_names`."
        )
    return model, tokenizer
