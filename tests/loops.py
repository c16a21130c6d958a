"""Private runs on the tiny task in a loop of one's own, without a Trainer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tiny
import torch
from torch import nn
from transformers import DataCollatorWithPadding

from hf_dp import DpSgdPlan, NoisedLoss, PrivacyPlan, PrivateRun
from hf_dp.batches.loader import BatchOptions
from hf_dp.losses import per_example_loss
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


def steps(mechanism: Any) -> Iterator[Any]:
    """Set the noised gradients of each step, and yield what was clipped for it."""
    for batches in mechanism.logical_batches():
        clipped = mechanism.clip(batches)
        with mechanism.run.release_step() as release:
            mechanism.set_gradients(clipped, release)
        yield clipped
        mechanism.run.model.zero_grad()


def various() -> nn.Module:
    """The tiny model, whose gradients have different norms."""
    made = tiny.model()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def clip(mechanism, indices: list[int], gauge: float):
    """What a draw of these rows adds, and its count, at a gauge."""
    loader = mechanism.loader()
    mechanism.gauge.ratio = gauge
    batches = loader.collate_fn([loader.dataset[i] for i in indices]) if indices else []
    clipped = mechanism.clip(batches)
    sums = torch.cat([each.flatten() for each in clipped.values.values()])
    return sums, float(clipped.beside.get("count", 0))


def one_by_one(mechanism, indices: list[int]) -> list[torch.Tensor]:
    """Gradients one by one, by plain autograd."""
    run, loader, found = mechanism.run, mechanism.loader(), []
    for index in indices:
        (batch,) = loader.collate_fn([loader.dataset[index]])
        per_example_loss(run.model, dict(batch)).sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in run.model.parameters()]))
        run.model.zero_grad()
    return found


class Empty(SecretRandomness):
    """Secret noise, and draws in which nobody is."""

    def random_bytes(self, count: int) -> bytes:
        return b"\xff" * count
