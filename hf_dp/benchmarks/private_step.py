"""Measure the speed and memory of private steps of any model, on made-up tokens."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import nn

from hf_dp import _validate
from hf_dp.benchmarks.memory import meter_of
from hf_dp.benchmarks.workload import made_up
from hf_dp.clipping.engine import ClippingEngine
from hf_dp.losses import per_example_loss


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
    device = next(model.parameters()).device.type
    batch = made_up(model, *size)
    meter = meter_of(device)
    seconds = []
    model.train()
    for repeat in range(_validate.integer("repeats", repeats, 1) + 1):
        if repeat == 1:
            meter.start()
        before = time.perf_counter()
        with ClippingEngine(model, 0.1) as engine:
            with torch.autocast(device, torch.bfloat16, enabled=bf16):
                losses = per_example_loss(model, batch)
            engine.backward(losses)
            engine.collect()
        if device == "cuda":
            torch.cuda.synchronize()  # so that the clock measures its work
        seconds.append(time.perf_counter() - before)
    return StepCost(size[0] / statistics.median(seconds[1:]), meter.peak())
