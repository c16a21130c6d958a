"""What several processes cost, by arithmetic: bytes sent, memory held and time, beside stock.

Bytes and memory are counted in a test on 1, 2 and 4 processes (``tests/benchmarks/test_scale.py``).
Times are predictions: no one has measured them. All numbers are float32, the optimizer keeps two
for each trained one (AdamW), and activations are left out: they are as in one process.

The model of time: rings, in which each of W processes sends (W - 1) / W of what is scattered or
gathered in W - 1 messages; stock reductions and FSDP2's gathers hide behind computation, ours do
not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.stats import poisson
from torch import nn

from hf_dp import _validate
from hf_dp.benchmarks.shapes import SHAPES
from hf_dp.clipping.sharded_sums import reduced_each_batch
from hf_dp.distributed.sums import BUCKET

BYTES = 4  # of a float32
WIDE = 8  # of a float64: sums over physical batches
_OPTIMIZER = 2  # numbers that AdamW keeps for each trained one
_STOCK_BUCKET = 25 * 2**20  # bytes of DDP's buckets
_BACKWARD = 2 / 3  # share of the arithmetic of a physical batch that is backward

COUNTS = (1, 2, 4, 8, 32, 128, 512, 1024)  # of processes, in the table


@dataclass(frozen=True)
class Sizes:
    """How many numbers a model has, and how FSDP2 groups them.

    Attributes:
        trained: trained ones.
        frozen: all others.
        outer: those in no layer, which FSDP2 gathers once a physical batch and keeps until its end.
        layer: those of the largest layer.
        layers: how many layers there are.
        largest: those of the largest trained parameter.
        scattered: those whose sums are reduced after every physical batch under FSDP2.
        scattered_parameters: how many parameters these are.
    """

    trained: int
    frozen: int
    outer: int
    layer: int
    layers: int
    largest: int
    scattered: int
    scattered_parameters: int

    @classmethod
    def of(cls, model: nn.Module) -> Sizes:
        """Count those of a model, whose layers are in lists of modules; it may be on ``meta``."""
        parameters = list(model.parameters())
        trained = [p for p in parameters if p.requires_grad]
        layers = [
            set(layer.parameters())
            for module in model.modules()
            if isinstance(module, nn.ModuleList)
            for layer in module
        ]
        inside = {p for layer in layers for p in layer}
        scattered = reduced_each_batch(trained)
        return cls(
            trained=_numbers(trained),
            frozen=_numbers(p for p in parameters if not p.requires_grad),
            outer=_numbers(p for p in parameters if p not in inside),
            layer=max((_numbers(layer) for layer in layers), default=0),
            layers=len(layers),
            largest=max(p.numel() for p in trained),
            scattered=_numbers(scattered),
            scattered_parameters=len(scattered),
        )

    @property
    def all(self) -> int:
        """All numbers of the model."""
        return self.trained + self.frozen


def _numbers(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)


@dataclass(frozen=True)
class Traffic:
    """What all processes do together in one step, in bytes of whole tensors.

    Attributes:
        scattered: reduce-scattered.
        gathered: all-gathered.
        reduced: all-reduced.
        calls: how many scatters and gathers.
        reductions: how many all-reduces.
    """

    scattered: int = 0
    gathered: int = 0
    reduced: int = 0
    calls: int = 0
    reductions: int = 0

    def sent(self, processes: int) -> float:
        """Return the bytes that each process sends; an all-reduce is a scatter and a gather."""
        share = (processes - 1) / processes
        return share * (self.scattered + self.gathered + 2 * self.reduced)

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.scattered + other.scattered,
            self.gathered + other.gathered,
            self.reduced + other.reduced,
            self.calls + other.calls,
            self.reductions + other.reductions,
        )

    def __mul__(self, times: int) -> Traffic:
        return Traffic(*(times * each for each in vars(self).values()))


# -- bytes --


def stock_ddp_traffic(sizes: Sizes) -> Traffic:
    """Return that of DDP: gradients, once a step."""
    numbers = BYTES * sizes.trained
    return Traffic(reduced=numbers, reductions=math.ceil(numbers / _STOCK_BUCKET))


def private_ddp_traffic(sizes: Sizes) -> Traffic:
    """Return that of ours under DDP: sums to their owners, and noisy ones to all, once a step."""
    numbers = WIDE * sizes.trained
    return Traffic(numbers, numbers, calls=2 * math.ceil(sizes.trained / BUCKET))


def gathers(sizes: Sizes) -> Traffic:
    """Return what FSDP2 gathers in one physical batch: layers in forward and in backward, the
    others once."""
    layers = sizes.all - sizes.outer
    return Traffic(gathered=BYTES * (sizes.outer + 2 * layers), calls=1 + 2 * sizes.layers)


def scatters(sizes: Sizes) -> Traffic:
    """Return what ours scatters under FSDP2 after one physical batch: the larger sums, once all
    know which of them somebody used (two integers of 4 bytes for each)."""
    return Traffic(
        BYTES * sizes.scattered,
        reduced=8 * sizes.scattered_parameters,
        calls=math.ceil(sizes.scattered / BUCKET),
        reductions=min(1, sizes.scattered_parameters),
    )


def stock_fsdp2_traffic(sizes: Sizes, physical_batches: int) -> Traffic:
    """Return that of FSDP2 with gradients scattered once a step."""
    last = Traffic(BYTES * sizes.trained, calls=1 + sizes.layers)
    return gathers(sizes) * physical_batches + last


def private_fsdp2_traffic(sizes: Sizes, physical_batches: int) -> Traffic:
    """Return that of ours under FSDP2: the smaller sums are all-reduced, once a step."""
    each = gathers(sizes) + scatters(sizes)
    smaller = sizes.trained - sizes.scattered
    return each * physical_batches + Traffic(reduced=WIDE * smaller, reductions=min(1, smaller))


# -- memory --


@dataclass(frozen=True)
class Held:
    """Bytes that one process holds at the end of a logical batch, before the update.

    Attributes:
        parameters: its own.
        gradients: clipped sums take twice as much, until they become gradients, one by one.
        optimizer: its state.
        gathered: whole layers while they compute.
        whole: gradients or sums of full size under FSDP2.
        bucket: buffers of what is exchanged; ours has one more bucket than is said here.
    """

    parameters: float
    gradients: float
    optimizer: float
    gathered: float = 0.0
    whole: float = 0.0
    bucket: float = 0.0

    @property
    def total(self) -> float:
        """All of them: the most that is held at once, or more."""
        return sum(vars(self).values())


def stock_ddp_memory(sizes: Sizes) -> Held:
    """Return that of DDP, whose buckets hold the gradients a second time."""
    return _own(sizes, 1, bucket=BYTES * sizes.trained)


def private_ddp_memory(sizes: Sizes, processes: int) -> Held:
    """Return that of ours under DDP: one bucket, what this process owns of it, and the noise."""
    bucket = min(sizes.trained, BUCKET)
    return _own(sizes, 1, bucket=WIDE * bucket * (1 + 2 / processes))


def stock_fsdp2_memory(sizes: Sizes, processes: int, physical_batches: int) -> Held:
    """Return that of FSDP2; gradients that wait for the last physical batch are of full size."""
    waiting = sizes.trained if physical_batches > 1 else 0
    return _own(sizes, processes, gathered=_gathered(sizes), whole=BYTES * waiting)


def private_fsdp2_memory(sizes: Sizes, processes: int) -> Held:
    """Return that of ours under FSDP2: the smaller sums whole, twice while they are reduced; a
    bucket of the larger ones, or one of them, with what is sent and received of them."""
    smaller = sizes.trained - sizes.scattered
    full = min(sizes.scattered, BUCKET + sizes.largest)
    exchanged = BYTES * (full + min(full, BUCKET) + full / processes)
    return _own(
        sizes,
        processes,
        gathered=_gathered(sizes),
        whole=WIDE * smaller,
        bucket=max(WIDE * smaller, exchanged),
    )


def _own(sizes: Sizes, shards: int, **more: float) -> Held:
    share = BYTES / shards
    return Held(
        sizes.all * share, sizes.trained * share, _OPTIMIZER * sizes.trained * share, **more
    )


def _gathered(sizes: Sizes) -> float:
    """Return the bytes that are whole while a layer computes and the next one is gathered."""
    return BYTES * (sizes.outer + min(2, sizes.layers) * sizes.layer)


# -- draws --


def expected_most(mean: float, processes: int, batch: int = 1) -> float:
    """Return the expected number of physical batches of the process that has most of them.

    Each process draws a Poisson number of examples, of this mean, independently; with F its
    distribution function the result is ``sum_j (1 - F(j b)^W)`` over j = 0, 1, ... (with b = 1, the
    expected largest number of examples). A draw of each row with a small probability is nearly
    Poisson, and never more spread.

    Args: mean: of the examples of one process. batch: b, examples of a physical batch.
    """
    total, j = 0.0, 0
    while True:
        above = -math.expm1(processes * float(poisson.logcdf(j * batch, mean)))
        total += above
        j += 1
        if above < 1e-9 and j * batch > mean:
            return total


# -- time --


@dataclass(frozen=True)
class Machine:
    """What a prediction needs to know.

    Attributes:
        seconds_per_example: of non-private forward and backward on one device.
        relative_speed: of private forward and backward, beside that (``hf-dp bench throughput``).
        bandwidth: bytes a second that a process sends.
        latency: seconds of a message.
        noise_per_second: normal numbers that a process draws (one core was measured to draw 1.2e8).
        seconds_per_record: of one entry of the ledger, until it is durable (measured).
    """

    seconds_per_example: float = 1e-3
    relative_speed: float = 0.926
    bandwidth: float = 25e9
    latency: float = 2e-6
    noise_per_second: float = 5e9
    seconds_per_record: float = 0.02

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, _validate.positive(name, value))

    def seconds(self, traffic: Traffic, processes: int) -> float:
        """Return how long collectives take, one after the other."""
        messages = (traffic.calls + 2 * traffic.reductions) * (processes - 1)
        return traffic.sent(processes) / self.bandwidth + messages * self.latency


def stock_ddp_seconds(
    sizes: Sizes, machine: Machine, processes: int, mean: float, batch: int
) -> float:
    """Predict a step of DDP: reductions hide behind the last backward."""
    exchanged = machine.seconds(stock_ddp_traffic(sizes), processes)
    last = _BACKWARD * min(batch, mean) * machine.seconds_per_example
    return mean * machine.seconds_per_example + max(0.0, exchanged - last)


def private_ddp_seconds(
    sizes: Sizes, machine: Machine, processes: int, mean: float, batch: int
) -> float:
    """Predict a step of ours under DDP: all wait for the largest draw."""
    examples = expected_most(mean, processes)
    return (
        examples * machine.seconds_per_example / machine.relative_speed
        + machine.seconds(private_ddp_traffic(sizes), processes)
        + _release(sizes, machine, processes)
    )


def stock_fsdp2_seconds(
    sizes: Sizes, machine: Machine, processes: int, mean: float, batch: int
) -> float:
    """Predict a step of FSDP2: gathers hide behind computation, scatters behind the last
    backward."""
    batches = math.ceil(mean / batch)
    computed = mean * machine.seconds_per_example
    gathered = machine.seconds(gathers(sizes) * batches, processes)
    last = stock_fsdp2_traffic(sizes, 0)
    hides = _BACKWARD * computed / batches
    return max(computed, gathered) + max(0.0, machine.seconds(last, processes) - hides)


def private_fsdp2_seconds(
    sizes: Sizes, machine: Machine, processes: int, mean: float, batch: int
) -> float:
    """Predict a step of ours under FSDP2: all wait for the largest draw, and exchange as often as
    the process with most physical batches."""
    batches = expected_most(mean, processes, batch)
    computed = expected_most(mean, processes) * machine.seconds_per_example / machine.relative_speed
    gathered = batches * machine.seconds(gathers(sizes), processes)
    scattered = batches * machine.seconds(scatters(sizes), processes)
    once = machine.seconds(private_fsdp2_traffic(sizes, 0), processes)
    return max(computed, gathered) + scattered + once + _release(sizes, machine, processes)


def _release(sizes: Sizes, machine: Machine, processes: int) -> float:
    """Return the seconds of ledger and noise; each process draws its share."""
    drawn = sizes.trained / processes / machine.noise_per_second
    return machine.seconds_per_record + drawn


# -- the table --


def predict(
    name: str,
    machine: Machine | None = None,
    mean: float = 512.0,
    batch: int = 64,
    counts: Sequence[int] = COUNTS,
) -> dict[str, Any]:
    """Return what ``hf-dp bench scale --json`` writes.

    Args:
        name: of a model, a key of SHAPES.
        mean: expected examples of each process in a step, so that the logical batch grows with the
            processes.
        batch: examples of a physical batch.
        counts: how many processes there are.

    Raises: InvalidArgumentError.
    """
    machine = machine or Machine()
    mean = _validate.positive("examples", mean)
    batch = _validate.integer("batch_size", batch, 1)
    _validate.one_of("model", name, SHAPES)
    with torch.device("meta"):
        sizes = Sizes.of(SHAPES[name].build(0.0, True))
    return {
        "benchmark": "scale",
        "model": name,
        "sizes": vars(sizes),
        "machine": vars(machine),
        "examples": mean,
        "batch_size": batch,
        "draws": [
            {
                "processes": count,
                "largest": expected_most(mean, count) / mean,
                "batches": expected_most(mean, count, batch),
            }
            for count in counts
        ],
        "ways": {
            "ddp": [_ddp(sizes, machine, count, mean, batch) for count in counts],
            "fsdp2": [_fsdp2(sizes, machine, count, mean, batch) for count in counts],
        },
    }


def _ddp(sizes: Sizes, machine: Machine, count: int, mean: float, batch: int) -> dict[str, Any]:
    arguments = (sizes, machine, count, mean, batch)
    return {
        "processes": count,
        "stock_sent": stock_ddp_traffic(sizes).sent(count),
        "private_sent": private_ddp_traffic(sizes).sent(count),
        "stock_held": stock_ddp_memory(sizes).total,
        "private_held": private_ddp_memory(sizes, count).total,
        "stock_seconds": stock_ddp_seconds(*arguments),
        "private_seconds": private_ddp_seconds(*arguments),
    }


def _fsdp2(sizes: Sizes, machine: Machine, count: int, mean: float, batch: int) -> dict[str, Any]:
    arguments = (sizes, machine, count, mean, batch)
    batches = math.ceil(mean / batch)
    return {
        "processes": count,
        "stock_sent": stock_fsdp2_traffic(sizes, batches).sent(count),
        "private_sent": private_fsdp2_traffic(sizes, batches).sent(count),
        "stock_held": stock_fsdp2_memory(sizes, count, batches).total,
        "private_held": private_fsdp2_memory(sizes, count).total,
        "stock_seconds": stock_fsdp2_seconds(*arguments),
        "private_seconds": private_fsdp2_seconds(*arguments),
    }
