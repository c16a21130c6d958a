"""Count what processes send and hold in real private steps, and compare it with the page.

The expected numbers are those of the tables of ``hf_dp/distributed/README.md``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loops
import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import on_processes
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertForSequenceClassification
from watch import watch

import hf_dp
from hf_dp.clipping import sharding
from hf_dp.clipping.sharding import ShardedSums, reduced_each_batch
from hf_dp.distributed.processes import BUCKET
from hf_dp.mechanisms.base import mechanism_for
from hf_dp.run.options import RunOptions

PAGE = Path(hf_dp.__file__).parent / "distributed" / "README.md"
BATCHES = 3  # physical ones of each process
MESSAGES = 100  # bytes: what processes tell each other is no more in one call


# Bytes of whole tensors, and how many calls: scatters and gathers, or all-reduces.
Traffic = Counter[str]


def model() -> nn.Module:
    """A model of whose tensors each can be cut into four equal parts."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    tables = {"vocab_size": 64, "max_position_embeddings": 32, "type_vocab_size": 4}
    config = BertConfig(num_hidden_layers=3, num_labels=4, **sizes, **tables)
    return BertForSequenceClassification(config)


def batch() -> dict[str, Tensor]:
    tokens = torch.arange(8).view(2, 4) + 5
    mask = torch.ones_like(tokens)
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.tensor([0, 1])}


class Collectives(TorchDispatchMode):
    """Counts what goes through collectives, in bytes of whole tensors, messages apart."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Traffic()
        self.scattered: list[tuple[int, int]] = []  # bytes in, bytes out

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, name = func.name().split("::")
        if space == "c10d":
            self._count(name, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        if name == "_allgather_base_":
            self.found.update(gathered=args[0].nbytes, calls=1)
        elif name in ("_reduce_scatter_base_", "alltoall_base_"):  # FSDP2's, ours between CPUs
            self.found.update(scattered=args[1].nbytes, calls=1)
            self.scattered.append((args[1].nbytes, args[1].nbytes // dist.get_world_size()))
        elif name == "allreduce_":
            reduced = sum(each.nbytes for each in args[0])
            if reduced != 8:  # the number of physical batches
                self.found.update(reduced=reduced, reductions=1)
        else:
            assert name == "allgather_" and args[1][0].nbytes < MESSAGES, name


def storage(tensors: Any) -> int:
    """Bytes of the storages behind tensors, each once."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    found = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in local)}
    return sum(found.values())


def opened(plain: nn.Module, folder: Any) -> Any:
    """A private run that is open."""
    options = RunOptions(other_training="public_rows")
    run = loops.run(folder, loops.plan(), model=plain, options=options)
    run.open()
    run.book.start(10)
    return run


def step(run: Any) -> None:
    """The lines of ``DPTrainer.training_step``, up to the update."""
    mechanism = mechanism_for(run)
    run.begin_step()
    clipped = mechanism.clip([batch()] * BATCHES)
    with run.release_step() as release:
        mechanism.set_gradients(clipped, release)


def counted(way: str, folder: Any) -> tuple[Traffic, dict[str, int], dict[str, int]]:
    """Traffic and bytes held of the second step in this process, and numbers of the model."""
    plain = model()
    layers = list(plain.bert.encoder.layer)
    inside = sum(p.numel() for layer in layers for p in layer.parameters())
    every = [p.numel() for p in plain.parameters()]
    scattered = [p.numel() for p in reduced_each_batch(list(plain.parameters()))]
    sizes = {
        "trained": sum(every), "outer": sum(every) - inside, "layers": len(layers),
        "largest": max(every), "scattered": sum(scattered), "parameters": len(scattered),
    }  # fmt: skip
    if way == "fsdp2":
        for part in (*layers, plain):
            fully_shard(part)
    run, optimizer = opened(plain, folder), torch.optim.AdamW(plain.parameters(), lr=1e-5)
    step(run)
    optimizer.step()  # makes its state
    optimizer.zero_grad()
    counter = Collectives()
    with counter, pytest.MonkeyPatch.context() as patch:
        whole = watch(patch, ShardedSums, "collect", before=lambda _, sums: storage(sums.values()))
        step(run)
    parameters = list(plain.parameters())
    state = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    held = {
        "parameters": storage(parameters),
        "gradients": storage(p.grad for p in parameters),
        "optimizer": storage(state),
    }
    if way == "fsdp2":
        exchanged = max((2 * size + own for size, own in counter.scattered), default=0)
        held |= {"whole": whole[0], "bucket": max(exchanged, whole[0])}
    else:
        held["bucket"] = max((size + 2 * own for size, own in counter.scattered), default=0)
    return counter.found, held, sizes


def expected(way: str, sizes: dict[str, int], processes: int) -> tuple[Traffic, dict[str, float]]:
    """What the page's tables say of ours, in bytes."""
    p, s = sizes["trained"], sizes["scattered"]
    if way == "ddp":
        traffic = Traffic(scattered=8 * p, gathered=8 * p, calls=2 * math.ceil(p / BUCKET))
        own = {"parameters": 4 * p, "gradients": 4 * p, "optimizer": 8 * p}
        return traffic, {**own, "bucket": 8 * min(p, BUCKET) * (1 + 2 / processes)}
    gathers = 4 * (sizes["outer"] + 2 * (p - sizes["outer"]))
    calls = 1 + 2 * sizes["layers"] + sizes["parameters"]
    # Before it is scattered, all learn which of the larger sums somebody used: two integers each.
    told = 8 * sizes["parameters"] * BATCHES
    traffic = Traffic(
        scattered=4 * s * BATCHES, gathered=gathers * BATCHES, reduced=8 * (p - s) + told,
        calls=calls * BATCHES, reductions=min(1, p - s) + min(1, s) * BATCHES,
    )  # fmt: skip
    exchanged = 4 * min(s, sizes["largest"]) * (2 + 1 / processes)
    share = p / processes
    own = {"parameters": 4 * share, "gradients": 4 * share, "optimizer": 8 * share}
    return traffic, {**own, "whole": 8 * (p - s), "bucket": max(8 * (p - s), exchanged)}


WAYS = [("ddp", 2**25), ("fsdp2", 2**25), ("fsdp2", 2000), ("fsdp2", 0)]


def counted_in_all_ways(folder: Path) -> Iterator[Any]:
    for way, at_the_end in WAYS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sharding, "_WHOLE", at_the_end)
            yield counted(way, folder / f"{way} {at_the_end}")


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ours_sends_and_holds_what_the_page_says(processes, tmp_path):
    for found in on_processes(processes, lambda: list(counted_in_all_ways(tmp_path))):
        for (way, _), (traffic, held, sizes) in zip(WAYS, found, strict=True):
            assert (traffic, held) == expected(way, sizes, processes)


def test_a_sum_that_travels_twice_is_seen(tmp_path, monkeypatch):
    """A planted fault: each bucket is scattered twice."""
    scatter = dist.all_to_all_single

    def twice(*args, **kwargs):
        scatter(*args, **kwargs)
        return scatter(*args, **kwargs)

    monkeypatch.setattr(dist, "all_to_all_single", twice)
    for traffic, _, sizes in on_processes(2, lambda: counted("ddp", tmp_path)):
        assert traffic["scattered"] == 2 * expected("ddp", sizes, 2)[0]["scattered"]


@pytest.mark.parametrize("mean", [16, 64, 256, 1024])
def test_the_page_shows_the_largest_draws_of_a_simulation(mean):
    (line,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {mean:,} |")]
    generator = np.random.default_rng(0)
    cells = [float(cell) for cell in line.strip("| ").split("|")[1:]]
    for shown, processes in zip(cells, (2, 8, 64, 1024), strict=True):
        most = generator.poisson(mean, (1000, processes)).max(1) / mean
        assert abs(shown - most.mean()) < 5 * most.std() / math.sqrt(len(most)) + 5e-4
