"""Pairs of answers, a model that is not its reference any more, and a trainer for both."""

from typing import Any

import tiny
import torch
from chat import model, tokenizer, words
from datasets import Dataset

from hf_dp.trainer.dpo import DPDPOConfig, DPDPOTrainer

ROWS = 24  # of fewer, the answers alone would tell rows apart
BETA = 0.5


def pairs(count: int = ROWS, start: int = 0) -> Dataset:
    def pair(i: int) -> dict[str, str]:
        answers = {
            "chosen": f" {words(i + 1, 1 + i % 4)}.",
            "rejected": f" {words(i + 2, 1 + (i * 3) % 5)}!",
        }
        return {"prompt": f"{i}: {words(i, 1 + i % 3)}?", **answers}

    return Dataset.from_list([pair(i) for i in range(start, start + count)])


def talks(count: int = ROWS, start: int = 0) -> Dataset:
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}

    def said(row: dict[str, str]) -> dict[str, Any]:
        return {name: [{"role": role, "content": row[name]}] for name, role in roles.items()}

    return Dataset.from_list([said(row) for row in pairs(count, start)])


def moved() -> Any:
    """A policy that is not its reference any more."""
    made = model()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def arguments(folder: Any, **options: Any) -> Any:
    sizes = {"expected_batch_size": 6, "per_device_train_batch_size": 8, "max_steps": 2}
    sizes["teacher_is_public"] = True  # the reference
    return tiny.arguments(folder, DPDPOConfig, **{**sizes, "beta": BETA, **options})


def trainer(folder: Any, made: Any = pairs, given: dict[str, Any] | None = None, **options: Any):
    models = {"model": moved(), "ref_model": model(), "processing_class": tokenizer()}
    keywords = {**models, "train_dataset": made(), **(given or {})}
    return DPDPOTrainer(args=arguments(folder, **options), **keywords)
