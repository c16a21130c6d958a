"""Rows of users and a trainer for them."""

from pathlib import Path

import tiny
import torch

C = 0.1
SECRET = [f"secret{number}" for number in range(12)]


def owners(count: int = 40) -> list[str]:
    """Users of 1 to 7 rows, not in order."""
    return [SECRET[(i * i + i // 7) % len(SECRET)] for i in range(count)]


def by_user(values=None, name: str = "who"):
    values = owners() if values is None else values
    return tiny.dataset(len(values)).add_column(name, values)


def trainer(folder: Path, values=None, given=None, **options):
    options = {
        "privacy_unit": "user", "privacy_unit_column": "who", "expected_batch_size": 4,
        "target_delta": 1e-3, "per_example_max_grad_norm": C, "per_device_train_batch_size": 4,
        **options,
    }  # fmt: skip
    return tiny.trainer(
        folder, given={"train_dataset": by_user(values), **(given or {})}, **options
    )


def flat(sums) -> torch.Tensor:
    return flat_of(sums.values())


def flat_of(tensors) -> torch.Tensor:
    return torch.cat([each.flatten().double() for each in tensors])
