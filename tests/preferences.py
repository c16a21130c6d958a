"""Pairs of answers, a model that is not its reference any more, and a trainer for both."""

from typing import Any

import torch
from chat import model, tokenizer, words
from datasets import Dataset

from hf_dp.trainer.dpo import DPDPOConfig, DPDPOTrainer

ROWS = 24  # of fewer, the answers alone would tell rows apart
BETA = 0.5


def pairs(count: int = ROWS, start: int = 0) -> Dataset:
    return Dataset.from_list(
        [
            {
                "prompt": f"{i}: {words(i, 1 + i % 3)}?",
                "chosen": f" {words(i + 1, 1 + i % 4)}.",
                "rejected": f" {words(i + 2, 1 + (i * 3) % 5)}!",
            }
            for i in range(start, start + count)
        ]
    )


def talks(count: int = ROWS, start: int = 0) -> Dataset:
    def said(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    return Dataset.from_list(
        [
            {
                "prompt": said("user", row["prompt"]),
                "chosen": said("assistant", row["chosen"]),
                "rejected": said("assistant", row["rejected"]),
            }
            for row in pairs(count, start)
        ]
    )


def moved() -> Any:
    """A policy that is not its reference any more."""
    made = model()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def arguments(folder: Any, **options: Any) -> DPDPOConfig:
    values = {
        "noise_multiplier": 1.0, "expected_batch_size": 6, "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 4, "max_steps": 2, "save_strategy": "no", "use_cpu": True,
        "disable_tqdm": True, "beta": BETA, **options,
    }  # fmt: skip
    return DPDPOConfig(str(folder), **values)


def trainer(folder: Any, made: Any = pairs, given: dict[str, Any] | None = None, **options: Any):
    models = {"model": moved(), "ref_model": model(), "processing_class": tokenizer()}
    keywords = {**models, "train_dataset": made(), **(given or {})}
    return DPDPOTrainer(args=arguments(folder, **options), **keywords)
