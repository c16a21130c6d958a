"""``hf-dp train --config FILE``: run a task's main in this process."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from hf_dp._validate import one_of
from hf_dp.cli.config import split_config
from hf_dp.cli.tasks import TASKS

HELP = """usage: hf-dp train --config FILE [--NAME VALUE ...]

Fine-tune a model, with differential privacy unless privacy_mode is non_private. Every key can stand in the YAML file or
on the command line (--learning_rate or --learning-rate); the command line wins; an unknown key is an error.

  --config FILE                 flat YAML: task, model, data and training arguments, and a block `peft:`
  --task NAME                   text_classification (default), masked_lm (pretraining on public text, not private)
  --model_name_or_path NAME     Hub name, folder, or package:NAME for a model inside a Python package
  --train_file, --validation_file FILE   .parquet, .csv, .json or .jsonl
  --dataset_name NAME --dataset_config NAME   instead: a data set on the Hub; --train_split, --validation_split
  --text_columns, --label_column NAME    default: sentence, label
  --infilling NAME              classify by filling in a word: sst2, mnli, qnli, qqp, or a block in YAML (default: a head)
  --metrics NAME ...            accuracy, f1 (accuracy)
  --max_length N                tokens (default 128)
  --output_dir FOLDER           checkpoint, model card (README.md) and privacy.json

privacy (defaults in parentheses)
  --target_epsilon E | --noise_multiplier S   exactly one; S = noise standard deviation / clipping norm
  --target_delta D              (1 / (2 x number of training rows))
  --expected_batch_size B       logical batch: expected rows drawn a step; sample rate = B / rows
  --max_logical_batch_size B    largest draw that is used whole; accounted for, by pld only (no limit)
  --per_device_train_batch_size b   physical batch: memory only, never the result (8)
  --per_example_max_grad_norm C     clipping norm, L2 (0.1)
  --accountant NAME             pld, rdp, prv (pld)
  --privacy_mode NAME           dp_sgd, dp_fp, non_private (dp_sgd)
  --release NAME ...            un-noised quantities to let out: training_loss (none)

  --help-all                    every key, TrainingArguments' included (slow: imports transformers)

example:
  hf-dp train --config recipes/sst2/minilm_dp_adam_eps3.yaml --train_file train.parquet --validation_file dev.parquet
"""


def main(argv: Sequence[str]) -> int:
    """Find the task (``--task`` or the YAML's ``task:``) and run it."""
    if not argv or any(word in ("-h", "--help") for word in argv):
        print(HELP)
        return 0 if argv else 2
    argv = ["--help" if word in ("--help-all", "--help_all") else word for word in argv]
    values, words = split_config(argv)
    task, rest = values.get("task", "text_classification"), list(argv)
    for position, word in enumerate(words):
        if word == "--task" and position + 1 < len(words):
            task = words[position + 1]
            start = rest.index("--task")
            del rest[start : start + 2]
    return int(importlib.import_module(TASKS[one_of("task", task, TASKS)]).main(rest))
