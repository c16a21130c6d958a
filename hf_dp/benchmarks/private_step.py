"""Measure the speed and memory of private steps of any model, on made-up tokens."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_dp import _validate
from hf_dp.benchmarks.memory_probe import CudaMeter, ResidentMeter
from hf_dp.clipping.engine import ClippingEngine
from hf_dp.losses import per_example_loss, task_of
from hf_dp.run.synthetic import synthetic_examples, takes_tokens

_FIRST_TOKEN = 4  # lower ids are padding and the like, which would shift RoBERTa's position ids


@dataclass(frozen=True)
class StepCost:
    """The cost of private steps of a model on this machine.

    Attributes:
        throughput: examples per second, forward to clipped sum; noise and optimizer are left out.
        bytes: peak memory beside what was in use before.
    """

    throughput: float
    bytes: int


def measure_step(
    model: nn.Module, batch_size: int, length: int, *, bf16: bool = False, repeats: int = 3
) -> StepCost:
    """Return what steps of a transformers model cost on made-up examples of full length.

    Rows that are shorter take less of both. Nothing is drawn from rows and nothing is released.

    Args:
        model: on the device where it trains; its trainable parameters count.
        batch_size: b, examples of a physical batch.
        length: T, tokens of each example; images have the size of the configuration.
        bf16: whether the forward runs under bfloat16 autocast.
        repeats: steps that are timed, after one that is not; the median counts.

    Raises: InvalidArgumentError naming the argument.
    """
    size = (_validate.integer("batch_size", batch_size, 1), _validate.integer("length", length, 2))
    device = next(model.parameters()).device
    batch = _made_up(model, *size, device)
    meter = CudaMeter() if device.type == "cuda" else ResidentMeter()
    seconds = []
    model.train()
    for repeat in range(_validate.integer("repeats", repeats, 1) + 1):
        if repeat == 1:
            meter.start()
        _wait(device)
        before = time.perf_counter()
        with ClippingEngine(model, 0.1) as engine:
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                losses = per_example_loss(model, batch)
            engine.backward(losses)
            engine.collect()
        _wait(device)
        seconds.append(time.perf_counter() - before)
    return StepCost(size[0] / statistics.median(seconds[1:]), meter.peak())


def _made_up(model: nn.Module, examples: int, length: int, device: Any) -> dict[str, Any]:
    """Return a batch of random tokens, (b, T), or images, and labels."""
    if not takes_tokens(model):
        alone = synthetic_examples(model, [length] * examples, [length] * examples)
        return {name: torch.cat([each[name] for each in alone]).to(device) for name in alone[0]}
    config: Any = model.config
    text = config.get_text_config()
    tokens = torch.randint(_FIRST_TOKEN, text.vocab_size, (examples, length))
    is_classifier = task_of(model) == "sequence_classification"
    labels = torch.randint(0, config.num_labels, (examples,)) if is_classifier else tokens.clone()
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    return {name: value.to(device) for name, value in batch.items()}


def _wait(device: Any) -> None:
    """Wait for a CUDA device, so that clocks measure its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
