"""Fine-tune a decoder to write: tables to text, dialog, chat, or free text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_dp.cli.tasks import generation
from hf_dp.tasks.generation.language_models import CAUSAL

ARGUMENTS = generation.ARGUMENTS
EXAMPLE = (
    "hf-dp train --config recipes/e2e/gpt2_full_eps8.yaml --train_file train.parquet \\\n"
    "      --validation_file test.parquet"
)


def train(values: dict[str, Any], words: Sequence[str]) -> int:
    """Run the task; print a summary whose last line is the output folder."""
    return generation.train(CAUSAL, values, words)


def trainer_of(values: dict[str, Any], words: Sequence[str]) -> Any:
    """Return the trainer of a configuration."""
    return generation.trainer_of(CAUSAL, values, words)[0]
