"""Fine-tune an encoder-decoder to write: tables to text, dialog, summaries, translation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_dp.cli.tasks import generation
from hf_dp.tasks.generation.language_models import SEQ2SEQ

ARGUMENTS = generation.ARGUMENTS
EXAMPLE = (
    "hf-dp train --task seq2seq --model_name_or_path google-t5/t5-small --data_format e2e \\\n"
    "      --train_file train.parquet --validation_file test.parquet --output_dir outputs/t5 \\\n"
    "      --target_epsilon 8 --expected_batch_size 1024 --learning_rate 1e-3"
)


def train(values: dict[str, Any], words: Sequence[str]) -> int:
    """Run the task; print a summary whose last line is the output folder."""
    return generation.train(SEQ2SEQ, values, words)


def trainer_of(values: dict[str, Any], words: Sequence[str]) -> Any:
    """Return the trainer of a configuration."""
    return generation.trainer_of(SEQ2SEQ, values, words)[0]
