"""The fixed choices of one measurement: model, batch, precision, device.

They are the same for every mode, so that all modes do equal work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_dp import _validate
from hf_dp.benchmarks.shapes import SHAPES, Shape
from hf_dp.clipping.forms import MEMORY_RATIO, check_memory_ratio
from hf_dp.losses import task_of

Batch = dict[str, Tensor]
PRECISIONS = ("fp32", "bf16")
DEVICES = ("cpu", "cuda")
_FIRST_TOKEN = 4  # lower ids are padding and the like, which would shift RoBERTa's position ids


@dataclasses.dataclass(frozen=True)
class Workload:
    """The fixed choices of one measurement.

    A field left at None takes the default of the model's shape, or of the machine.

    Attributes:
        model: a key of SHAPES.
        batch_size: examples in a physical batch.
        length: positions of each example.
        precision: ``fp32``, or ``bf16`` (autocast of the forward, float32 weights).
        device: ``cpu`` or ``cuda``.
        gradient_checkpointing: non-reentrant.
        threads: torch's intra-op threads.
        dropout: its probability everywhere.
        memory_ratio: as of :class:`~hf_dp.clipping.ClippingEngine`.
        chunked_loss: whether clipping modes form the loss by blocks of the vocabulary.

    Raises: InvalidArgumentError naming the field.
    """

    model: str
    batch_size: int | None = None
    length: int | None = None
    precision: str = "fp32"
    device: str | None = None
    gradient_checkpointing: bool = False
    threads: int | None = None
    dropout: float = 0.1
    memory_ratio: float | None = None
    chunked_loss: bool = False

    def __post_init__(self) -> None:
        _validate.one_of("model", self.model, SHAPES)
        _validate.one_of("precision", self.precision, PRECISIONS)
        ratio = MEMORY_RATIO if self.memory_ratio is None else self.memory_ratio
        object.__setattr__(self, "memory_ratio", check_memory_ratio("memory_ratio", ratio))
        fill = {
            "batch_size": self.shape.batch_size if self.batch_size is None else self.batch_size,
            "length": self.shape.length if self.length is None else self.length,
            "threads": torch.get_num_threads() if self.threads is None else self.threads,
        }
        for name, value in fill.items():
            object.__setattr__(
                self, name, _validate.integer(name, value, 2 if name == "length" else 1)
            )
        if self.positions > self.shape.positions:
            raise _validate.invalid(
                "length",
                self.length,
                f"to be at most {self.shape.positions}, the positions of {self.model}",
            )
        has_cuda = torch.cuda.is_available()
        device = self.device or ("cuda" if has_cuda else "cpu")
        object.__setattr__(self, "device", _validate.one_of("device", device, DEVICES))
        if device == "cuda" and not has_cuda:
            raise _validate.invalid(
                "device", device, "to be there, but torch finds no CUDA device", "Use 'cpu'."
            )

    @property
    def shape(self) -> Shape:
        """Return the model's sizes."""
        return SHAPES[self.model]

    @property
    def examples(self) -> int:
        """Return ``batch_size``, filled in."""
        assert self.batch_size is not None
        return self.batch_size

    @property
    def positions(self) -> int:
        """Return ``length``, filled in."""
        assert self.length is not None
        return self.length

    @property
    def on_cuda(self) -> bool:
        """Return whether the work runs on a CUDA device."""
        return self.device == "cuda"

    def replace(self, **changes: Any) -> Workload:
        """Return a copy with other values."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, filled in; ``Workload(**...)`` reads them back."""
        return dataclasses.asdict(self)


def build_model(workload: Workload, tied: bool = True) -> nn.Module:
    """Return the model with random weights, built on the device, in training mode.

    Args:
        tied: False gives the head a weight of its own.
    """
    torch.manual_seed(0)
    assert workload.device is not None
    with torch.device(workload.device):
        model = workload.shape.build(workload.dropout, tied)
    if workload.gradient_checkpointing:
        # The newer name where transformers has it; both are non-reentrant unless told otherwise.
        enable: Any = (
            getattr(model, "activation_checkpointing_enable", None)
            or model.gradient_checkpointing_enable
        )
        enable()
    return model.to(workload.device).train()


def make_batch(workload: Workload, model: nn.Module, examples: int | None = None) -> Batch:
    """Return random tokens and labels, every example of full length.

    The keys are ``input_ids`` and ``attention_mask``, (b, T), and ``labels``.
    """
    generator = torch.Generator().manual_seed(1)
    size = (examples or workload.examples, workload.positions)
    tokens = torch.randint(_FIRST_TOKEN, workload.shape.vocabulary, size, generator=generator)
    if valid := getattr(model, "valid_input_ids", None):
        tokens = valid(tokens)
    labels = (
        tokens
        if task_of(model) == "causal_lm"
        else torch.randint(0, 2, size[:1], generator=generator)
    )
    batch = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": labels.clone(),
    }
    return {name: value.to(workload.device) for name, value in batch.items()}


@contextmanager
def forward_precision(workload: Workload) -> Iterator[None]:
    """Run a forward and its loss as the Trainer does: under bfloat16 autocast, or plain."""
    assert workload.device is not None
    with torch.autocast(workload.device, torch.bfloat16, enabled=workload.precision == "bf16"):
        yield


@contextmanager
def threads_of(workload: Workload) -> Iterator[None]:
    """Set torch's number of threads to the workload's, inside the context."""
    before = torch.get_num_threads()
    assert workload.threads is not None
    torch.set_num_threads(workload.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
