"""Evaluate a model that writes: one that ``hf-dp train`` made, or the untrained base of one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_dp.cli.tasks.evaluation import EvalArguments, parse_evaluation
from hf_dp.errors import ConfigError
from hf_dp.tasks.generation.arguments import DecodingArguments, TextArguments
from hf_dp.tasks.models import StartArguments
from hf_dp.tasks.sources import load_evaluation

ARGUMENTS = (EvalArguments, StartArguments, TextArguments, DecodingArguments)
EXAMPLE = (
    "hf-dp eval --config recipes/e2e/gpt2_full_eps8.yaml --validation_file test.parquet\n"
    "      --decoding nucleus"
)


def evaluate(
    values: dict[str, Any], words: Sequence[str], *, task: str, zero_shot: bool
) -> tuple[dict[str, float], list[str]]:
    """Return the metrics by the Trainer's names, and as lines to read.

    Args:
        values: the keys of the configuration that the model was trained with.
        words: the command line's, which win.
        task: causal_lm or seq2seq.
        zero_shot: evaluate the untrained base instead.

    Raises: ConfigError, DataError, InvalidArgumentError.
    """
    import torch
    from transformers import DataCollatorForSeq2Seq

    from hf_dp.tasks.generation.encoding import encoding_of
    from hf_dp.tasks.generation.evaluation import evaluate_texts, evaluation_sets
    from hf_dp.tasks.generation.language_models import load_language_model, load_trained

    args, model_args, data, decoding = parse_evaluation(ARGUMENTS, values, words)
    if zero_shot and model_args.from_scratch:
        raise ConfigError(
            "--zero-shot evaluates the untrained base, and with `from_scratch` it knows nothing. "
            "Leave one of them out."
        )
    rows = load_evaluation(data)
    if zero_shot:
        model, tokenizer = load_language_model(model_args, task)
    else:
        path = args.trained or values.get("output_dir") or model_args.model_name_or_path
        model, tokenizer = load_trained(path, model_args, task)
    if torch.cuda.is_available() and not args.use_cpu:
        model = model.to("cuda")
    encoding = encoding_of(task, tokenizer, data)
    sets = evaluation_sets(rows, data, decoding, encoding)
    folder = None if zero_shot else args.trained or values.get("output_dir")
    found = evaluate_texts(
        model,
        tokenizer,
        DataCollatorForSeq2Seq(tokenizer),
        sets,
        data,
        decoding,
        folder=folder if folder and Path(folder).is_dir() else None,
        batch_size=args.per_device_eval_batch_size,
    )
    return found.metrics, found.lines
