"""Private runs on the tiny task in a loop of one's own, without a Trainer."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tiny
from torch import nn
from transformers import DataCollatorWithPadding

from hf_dp import DpSgdPlan, NoisedLoss, PrivacyPlan, PrivateRun
from hf_dp.batches.loader import BatchOptions
from hf_dp.noise import SecretRandomness
from hf_dp.run.options import RunOptions


def plan(rows: int = 40, loss: NoisedLoss | None = None, **changes: Any) -> PrivacyPlan:
    given: dict[str, Any] = {
        "num_examples": rows, "expected_batch_size": 8, "max_steps": 4, "accountant": "rdp",
        "mechanism": DpSgdPlan(0.1, 1.0, loss=loss),
    }  # fmt: skip
    return PrivacyPlan.solve(**{**given, **changes})


def run(
    folder: Path,
    planned: PrivacyPlan | None = None,
    *,
    model: nn.Module | None = None,
    train_dataset: Any = None,
    size: int = 4,
    options: RunOptions | None = None,
    **given: Any,
) -> PrivateRun:
    """A run of a plan on as many rows as it names. Args: size: of physical batches."""
    planned = planned or plan()
    rows = tiny.dataset(planned.num_examples).rename_column("label", "labels")
    return PrivateRun(
        model or tiny.model(),
        planned,
        folder,
        train_dataset=train_dataset or rows,
        data_collator=DataCollatorWithPadding(tiny.tokenizer()),
        options=options or RunOptions(batches=BatchOptions(size, quiet=True)),
        **given,
    )


class EmptyDraws(SecretRandomness):
    """Secret noise, and draws in which nobody is."""

    def random_bytes(self, count: int) -> bytes:
        return b"\xff" * count


def batches_of(mechanism: Any, indices: Sequence[int]) -> list[Any]:
    """The physical batches of a draw of these rows."""
    loader = mechanism.loader()
    return loader.collate_fn([loader.dataset[i] for i in indices]) if indices else []


def step(mechanism: Any, batches: Any) -> Any:
    """Set the noised gradients of a draw, and return what was clipped for it."""
    clipped = mechanism.clip(batches)
    with mechanism.run.release_step() as release:
        mechanism.set_gradients(clipped, release)
    return clipped


def steps(mechanism: Any) -> Iterator[Any]:
    """Make each step, and yield what was clipped for it."""
    for batches in mechanism.logical_batches():
        yield step(mechanism, batches)
        mechanism.run.model.zero_grad()
