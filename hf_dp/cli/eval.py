"""``hf-dp eval``: a classifier on evaluation rows, or what its base knows before any training
(``--zero-shot``)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_dp._validate import integer
from hf_dp.cli.config import check_keys, parse, split_config
from hf_dp.errors import ConfigError

HELP = """usage: hf-dp eval --config FILE [--zero-shot] [--NAME VALUE ...]

Metrics of a classifier on evaluation rows; prints one line a metric. The configuration is that of its training (keys that
only concern training are ignored); keys of model and data can stand on the command line.

  --config FILE                 flat YAML, as for `hf-dp train`
  --trained NAME                what to evaluate, a folder or Hub name (default: the configuration's output_dir)
  --zero-shot                   the untrained base with its template and label words (needs `infilling`): how well the words
                                fit the task before anything is spent (Li et al., figure 8)
  --json                        one JSON object on stdout, {"eval_accuracy": ...}
  --validation_file FILE ...    .parquet, .csv, .json or .jsonl
  --per_device_eval_batch_size b    rows at a time (8)

example:
  hf-dp eval --config recipes/glue/sst2/roberta_base_infilling_eps3.yaml --zero-shot
"""

_TIMINGS = ("_runtime", "_per_second", "_preparation_time", "_loss")


@dataclass
class EvalArguments:
    """How the evaluation runs."""

    trained: str | None = field(
        default=None, metadata={"help": "What to evaluate: a folder or Hub name."}
    )
    per_device_eval_batch_size: int = field(default=8, metadata={"help": "Rows at a time."})
    use_cpu: bool = field(default=False, metadata={"help": "Leave a GPU alone."})


def main(argv: Sequence[str]) -> int:
    """Prints one line a metric; exit code 2 (and a line on stderr) for what cannot be evaluated."""
    if not argv or any(word in ("-h", "--help") for word in argv):
        print(HELP)
        return 0 if argv else 2
    flags = {word.replace("_", "-") for word in argv} & {"--zero-shot", "--json"}
    values, words = split_config([word for word in argv if word.replace("_", "-") not in flags])
    metrics, lines = evaluate(values, words, zero_shot="--zero-shot" in flags)
    print(json.dumps(metrics) if "--json" in flags else "\n".join(lines))
    return 0


def evaluate(
    values: dict[str, Any], words: Sequence[str], *, zero_shot: bool
) -> tuple[dict[str, float], list[str]]:
    """Metrics by Trainer's names, and as lines to read, for a configuration and command-line
    words."""
    import dataclasses

    from transformers import Trainer, TrainingArguments

    from hf_dp.cli.tasks.classification_data import DataArguments, encode_all, load_evaluation
    from hf_dp.cli.tasks.text_classification import ModelArguments, load_classifier, metric_lines
    from hf_dp.tasks.classification import label_names, metrics
    from hf_dp.trainer.arguments import DPTrainingArguments

    if values.get("task", "text_classification") != "text_classification":
        raise ConfigError(f"Expected `task` to be text_classification, got {values['task']!r}.")
    kinds = [ModelArguments, DataArguments, EvalArguments]
    ours = {item.name for kind in kinds for item in dataclasses.fields(kind)}
    trainings = {item.name for item in dataclasses.fields(DPTrainingArguments)}
    check_keys(values, ours | trainings | {"task", "peft"})
    known = {key: value for key, value in values.items() if key in ours}
    model_args, data_args, args = parse(kinds, known, words, prog="hf-dp eval")
    if zero_shot and model_args.infilling is None:
        raise ConfigError(
            "--zero-shot needs `infilling`: a new classification head knows nothing before it is "
            "trained."
        )
    integer("per_device_eval_batch_size", args.per_device_eval_batch_size, 1)
    sets = load_evaluation(data_args)
    names = label_names(next(iter(sets.values())), data_args.label_column, data_args.class_names)
    if zero_shot:
        model, tokenizer = load_classifier(model_args, data_args, names)
    else:
        path = args.trained or values.get("output_dir") or model_args.model_name_or_path
        model, tokenizer = load_trained(path, model_args, data_args, names, values.get("seed", 42))
    columns = (
        tokenizer,
        data_args.text_columns,
        data_args.label_column,
        names,
        data_args.max_length,
    )
    trainer = Trainer(
        model,
        TrainingArguments(
            per_device_eval_batch_size=args.per_device_eval_batch_size,
            use_cpu=args.use_cpu,
            report_to="none",
        ),
        eval_dataset=encode_all(sets, columns),
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
    path: str, model_args: Any, data_args: Any, names: Sequence[str], seed: int = 42
) -> tuple[Any, Any]:
    """(model, tokenizer) of what ``hf-dp train`` wrote; an adapter on the base that the
    configuration names.

    Args: seed: with which it was trained; TrainingArguments' default.

    Raises: ConfigError when it cannot be loaded, or its classes are others.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

    from hf_dp.cli.tasks.text_classification import load_classifier
    from hf_dp.tasks.files import resolve_model

    folder = resolve_model(path)
    try:
        if Path(folder, "adapter_config.json").exists():
            from peft import PeftModel

            set_seed(seed)  # what the base's checkpoint lacks is drawn as in training
            base, tokenizer = load_classifier(model_args, data_args, names)
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
            f"The classifier {path!r} has the classes {known}, and the data {list(names)}."
        )
    return model, tokenizer
